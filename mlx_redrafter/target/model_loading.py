"""Models of mlx-lm for targets and draft models: loaded, or made from a config alone."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, MODEL_REMAPPING

from mlx_redrafter.checkpoint_files import CONFIG_FILE, find_checkpoint, read_config, read_shapes
from mlx_redrafter.errors import CheckpointError, explain, first_line
from mlx_redrafter.target.model_parts import MLX_LM_MODELS, check_config, find_parts


def find_model(name: str) -> Path:
    """Find the folder of a model; its weights are downloaded only if its config is supported.

    Raise `CheckpointError` if the files cannot be found or read, and `UnsupportedTargetError` if
    the model cannot be decoded exactly.
    """
    check_config(read_config(find_checkpoint(name, [CONFIG_FILE])))
    return find_checkpoint(name, DEFAULT_ALLOW_PATTERNS)


def load_model(
    name: str,
    tokenizer_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    lazy: bool = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a stock model and its tokenizer; ``lazy`` leaves the weights in their files."""
    folder = find_model(name)
    read_shapes(folder)  # names a truncated file before mlx-lm allocates memory
    try:
        model, tokenizer, *_ = mlx_lm.load(
            str(folder),
            # Else transformers asks at the terminal whether to run the checkpoint's code.
            tokenizer_config={"trust_remote_code": trust_remote_code, **(tokenizer_config or {})},
            adapter_path=None if adapter_path is None else str(adapter_path),
            trust_remote_code=trust_remote_code,
            lazy=lazy,
        )
        model(mx.array([[0]]))  # never computed: it fails unless the parts fit together
        if not tokenizer.encode("a", add_special_tokens=False):
            # transformers makes an empty one then, for which every prompt is empty.
            raise ValueError("its tokenizer has no letters, as without its tokenizer.json")
    except PermissionError as error:
        raise CheckpointError(f"cannot read {error.filename or name}: {explain(error)}") from error
    except Exception as error:  # loading damaged files may raise anything
        adapter = "" if adapter_path is None else f" with the adapter {adapter_path}"
        raise CheckpointError(
            f"mlx-lm cannot load {name}{adapter}: {first_line(error)}; download or convert it again"
        ) from error
    return model, tokenizer


def make_model(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Make the model of a ``config.json``; MLX creates random weights when they are first read.

    Raise `CheckpointError` if mlx-lm cannot make it, `UnsupportedTargetError` as `find_model` does.
    """
    check_config(config)
    kind = config["model_type"]
    module = importlib.import_module(MLX_LM_MODELS + MODEL_REMAPPING.get(kind, kind))
    try:
        model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
        find_parts(model)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"mlx-lm cannot make {name} from its config.json ({error}); is it damaged?"
        ) from error
    return model

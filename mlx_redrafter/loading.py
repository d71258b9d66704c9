"""Loading a target and its drafter; whatever can be checked cheaply is checked first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_redrafter.bundled import find_bundled
from mlx_redrafter.checkpoint import find_checkpoint, read_config, read_shapes
from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.generation import check_fit
from mlx_redrafter.policy.precision import choose_precision
from mlx_redrafter.proposers.redrafter.checkpoint import load_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.architectures import check_config
from mlx_redrafter.target.target import Target

CONFIG_ONLY = ["config.json"]


def load(
    path_or_repo: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, TokenizerWrapper, Drafter | None]:
    """Load a model with mlx-lm, and the drafter made for it.

    Both configs are fetched and checked before any weights are. Weights keep the dtype they are
    stored in, except the bundled pair's, which are stored in float16 to be small and returned in
    float32. On a CPU float16 is several times slower; on a GPU its kernels for one and for several
    tokens may round differently, and in float32 far fewer tokens are near enough to a tie for that
    to matter. What the bundled model writes is what stock mlx-lm writes with it in float32. A
    drafter that drafts faster in 8 bits on this device is returned so; `load_drafter` reads one as
    it is stored.

    Args:
        path_or_repo: The model: a folder, or a repository on the Hugging Face Hub; None is the
            bundled one.
        drafter: The drafter, likewise. None loads none, or the bundled one for the bundled model.
        tokenizer_config: Extra options for the tokenizer.
        adapter_path: Folder of a LoRA adapter for the model.
        trust_remote_code: Let mlx-lm and the tokenizer run code from the checkpoint.

    Returns:
        The stock mlx-lm model, its tokenizer, and the drafter or None.

    Raises:
        CheckpointError: A checkpoint is missing or damaged, or the drafter is for another model.
        NonFiniteError: The drafter's weights are not finite.
        UnsupportedTargetError: Trees of this architecture would not be decoded exactly.
    """
    is_bundled = path_or_repo is None
    if path_or_repo is None:
        path_or_repo = find_bundled("target")
        drafter = find_bundled("drafter") if drafter is None else drafter
    name = str(path_or_repo)
    config = read_config(find_checkpoint(name, CONFIG_ONLY))
    check_config(config)
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise CheckpointError(f"no such adapter folder: {adapter_path}")
    loaded_drafter = None
    if drafter is not None:
        draft_values = read_config(find_checkpoint(drafter, CONFIG_ONLY))
        _check_sizes(DrafterConfig.from_dict(draft_values), config)
        loaded_drafter = load_drafter(drafter)

    folder = find_checkpoint(name, DEFAULT_ALLOW_PATTERNS)
    read_shapes(folder)  # names a truncated file before memory is spent
    try:
        model, tokenizer, *_ = mlx_lm.load(
            str(folder),
            tokenizer_config={
                "trust_remote_code": trust_remote_code,
                **(tokenizer_config or {}),
            },
            adapter_path=None if adapter_path is None else str(adapter_path),
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"mlx-lm cannot load {name}: {reason[0]}") from error
    if is_bundled:
        model.set_dtype(mx.float32)
        if loaded_drafter is not None:
            loaded_drafter.set_dtype(mx.float32)
    target = Target(model)
    if loaded_drafter is not None:
        check_fit(loaded_drafter, target, tokenizer.vocab_size)
        loaded_drafter = choose_precision(loaded_drafter, target)
    return model, tokenizer, loaded_drafter


def _check_sizes(drafter: DrafterConfig, config: Mapping[str, Any]) -> None:
    """What `check_fit` checks, as far as the target's config alone tells."""
    text_config = config.get("text_config")
    values = text_config if isinstance(text_config, Mapping) else config
    hidden_size = values.get("hidden_size", drafter.hidden_size)
    if hidden_size != drafter.hidden_size:
        raise CheckpointError(
            f"the drafter's hidden_size {drafter.hidden_size} does not match the target's "
            f"{hidden_size}; use a drafter trained for this model"
        )
    vocab_size = values.get("vocab_size", drafter.vocab_size)
    if isinstance(vocab_size, int) and vocab_size < drafter.vocab_size:
        raise CheckpointError(
            f"the drafter's vocab_size {drafter.vocab_size} does not match the target's "
            f"{vocab_size}; use a drafter trained for this model"
        )

"""Loading of MTP modules out of a model's own folder, or of a folder with nothing else in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint import find_checkpoint, read_config, read_shapes
from mlx_redrafter.errors import CheckpointError, ConfigError, first_line
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.redrafter.checkpoint import PATTERNS, fill
from mlx_redrafter.target.inspection import check_config

# The type of the models whose modules are supported, and where the tensors of these stand.
MODEL_TYPE = "mimo"
MODULES = "model.mtp_layers."
PREFIX = f"{MODULES}0."
# Names that stand outside of the decoder layer.
OUTSIDE_BLOCK = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")


def is_mtp(values: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a folder has the tensors of an MTP module and none of a model's."""
    of_module = [name.startswith(MODULES) for name in names]
    return bool(of_module) and all(of_module)


def load_mtp(path_or_repo: str | Path) -> Mtp:
    """Load a model's MTP module, the first where there are several.

    Args:
        path_or_repo: The model's folder or repository, or a folder with its ``config.json`` and
            its MTP tensors alone.

    Returns:
        The module in the dtype it was stored in, its weights in memory.

    Raises:
        CheckpointError: There are no such tensors, or they do not fit the config; each is named.
            Or the config has values out of range.
        ConfigError: The model is of a kind whose modules are not supported.
        NonFiniteError: A weight is NaN or infinite.
    """
    folder = find_checkpoint(path_or_repo, PATTERNS)
    values = read_config(folder)
    if values.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"expected a model of type {MODEL_TYPE} with an MTP module, found "
            f"{values.get('model_type')!r}; use a drafter or lookup"
        )
    check_config(values)
    names = [name for name in read_shapes(folder) if name.startswith(PREFIX)]
    if not names:
        raise CheckpointError(
            f"no tensors {PREFIX}* in {folder}, which converted copies often lack; give the "
            "folder of the original model, or of its MTP tensors, as the drafter"
        )
    try:
        module = Mtp(values)
    except Exception as error:  # what is made of damaged files may raise anything
        raise CheckpointError(
            f"the config.json in {folder} does not describe a model: {first_line(error)}; download "
            "it again"
        ) from error
    fill(module, folder, values, {_own_name(name.removeprefix(PREFIX)): name for name in names})
    return module


def _own_name(name: str) -> str:
    return name if name.startswith(OUTSIDE_BLOCK) else f"block.{name}"

"""Loading and saving of SpecFormers, with the published names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import (
    find_checkpoint,
    named_parameters,
    read_config,
    write_checkpoint,
)
from mlx_redrafter.errors import CheckpointError, first_line
from mlx_redrafter.proposers.draft_network import quantization_of
from mlx_redrafter.proposers.redrafter.checkpoint import PATTERNS, fill
from mlx_redrafter.proposers.specformer.config import SpecFormerConfig
from mlx_redrafter.proposers.specformer.network import SpecFormer


def load_specformer(path_or_repo: str | Path) -> SpecFormer:
    """Load a SpecFormer from a folder or a hub repository.

    Args:
        path_or_repo: A folder with ``config.json`` and ``model.safetensors``, or a repository id.

    Returns:
        The network in the dtype it was stored in, its weights in memory.

    Raises:
        CheckpointError: See `load_drafter`.
        NonFiniteError: A weight is NaN or infinite.
    """
    folder = find_checkpoint(path_or_repo, PATTERNS)
    values = read_config(folder)
    network = _new(SpecFormerConfig.from_dict(values))
    fill(network, folder, values)
    return network


def save_specformer(
    network: SpecFormer, folder: str | Path, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write a network so that `load_specformer` reads it back; files appear whole or not at all.

    Args:
        network: The network, quantised or not.
        folder: Destination folder, created when it does not exist.
        extra_config: Further keys for ``config.json``, such as where the weights come from.
    """
    config = network.config.to_dict()
    quantization = quantization_of(network)
    if quantization is not None:
        config["quantization"] = quantization
    config.update(extra_config or {})
    write_checkpoint(Path(folder), config, named_parameters(network))


def _new(config: SpecFormerConfig) -> SpecFormer:
    try:
        return SpecFormer(config)
    except Exception as error:  # of a scaling of the rotary embedding that it does not know
        raise CheckpointError(
            f"mlx-lm cannot make the layers of this SpecFormer: {first_line(error)}; check "
            "rope_scaling in config.json"
        ) from error

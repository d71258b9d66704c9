"""Loading of Medusa heads: this package's folders, and published safetensors files as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_redrafter.checkpoint_files import (
    find_checkpoint,
    read_config,
    read_shapes,
)
from mlx_redrafter.proposers.medusa.config import MODEL_TYPE, MedusaConfig
from mlx_redrafter.proposers.medusa.layouts import read_heads
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter.checkpoint import PATTERNS, fill


def load_medusa(
    path_or_repo: str | Path, check: Callable[[MedusaConfig], None] = lambda config: None
) -> Medusa:
    """Load Medusa heads from a folder or a hub repository.

    Args:
        path_or_repo: A folder with ``config.json`` and ``model.safetensors``, or
            ``medusa_lm_head.safetensors``, or a repository id.
        check: Called with the config before weights are read; its errors are passed on.

    Returns:
        The heads in the dtype they were stored in, their weights in memory.

    Raises:
        CheckpointError: See `load_drafter`; the tensors contradict the config, or belong to a whole
            model.
        NonFiniteError: A weight is NaN or infinite.
    """
    folder = find_checkpoint(path_or_repo, PATTERNS)
    values = read_config(folder)
    if values.get("model_type") == MODEL_TYPE:
        config, sources = MedusaConfig.from_dict(values), None
    else:
        found = read_heads(values, read_shapes(folder))
        config, sources = found.config, found.sources
    check(config)
    network = Medusa(config)
    fill(network, folder, values, sources)
    return network

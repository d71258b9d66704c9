"""Loading and saving EAGLE heads: as published in safetensors, and as `convert` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import (
    find_checkpoint,
    named_parameters,
    read_config,
    read_shapes,
    read_tensors,
    write_checkpoint,
)
from mlx_redrafter.errors import CheckpointError, first_line
from mlx_redrafter.proposers.draft_network import quantization_of
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE, EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import (
    own_names,
    published_config,
    resolve_offsets,
)
from mlx_redrafter.proposers.redrafter.checkpoint import (
    PATTERNS,
    check_finite,
    check_floating,
    check_shapes,
    check_token_ids,
    quantize_as_stored,
)


def load_eagle(path_or_repo: str | Path) -> Eagle:
    """Load an EAGLE head from a folder or a hub repository.

    Args:
        path_or_repo: A folder with ``config.json`` and ``model.safetensors``, or a repository id.

    Returns:
        The head in the dtype it was stored in, its weights in memory.

    Raises:
        CheckpointError: Files are missing, truncated or foreign, or the config or ``token_ids`` has
            values out of range; every tensor that is missing, unexpected or of another shape or
            kind of numbers is named.
        NonFiniteError: A weight is NaN or infinite.
    """
    folder = find_checkpoint(path_or_repo, PATTERNS)
    values, stored = read_config(folder), read_shapes(folder)
    names = own_names(stored)
    shapes = {own: stored[name] for own, name in names.items()}
    eagle = new_eagle(read_eagle_config(values, shapes))
    if "quantization" in values:
        quantize_as_stored(eagle, values["quantization"], shapes)
    check_shapes(eagle, shapes, folder, names)
    tensors = read_tensors(folder)
    weights = {own: tensors[name] for own, name in names.items()}
    resolve_offsets(weights, names)
    check_floating(eagle, weights, folder)
    eagle.load_weights(list(weights.items()))
    check_finite(eagle, folder)
    check_token_ids(eagle, folder)
    eagle.eval()
    mx.eval(eagle.parameters())
    return eagle


def new_eagle(config: EagleConfig) -> Eagle:
    """A head of these sizes, whose random weights are not computed.

    Raises:
        CheckpointError: mlx-lm cannot make its layers.
    """
    try:
        return Eagle(config)
    except Exception as error:  # of a scaling of the rotary embedding that it does not know
        raise CheckpointError(
            f"mlx-lm cannot make the layers of this EAGLE head: {first_line(error)}; check "
            "rope_scaling in config.json"
        ) from error


def read_eagle_config(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> EagleConfig:
    """The config in a ``config.json`` of this package or as published; see `published_config`."""
    if values.get("model_type") == MODEL_TYPE:
        return EagleConfig.from_dict(values)
    return published_config(values, shapes)


def save_eagle(
    eagle: Eagle, folder: str | Path, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write a head so that `load_eagle` reads it back; files appear whole or not at all.

    Args:
        eagle: The head, quantised or not.
        folder: Destination folder, created when it does not exist.
        extra_config: Further keys for ``config.json``, such as where the weights come from.
    """
    config = eagle.config.to_dict()
    quantization = quantization_of(eagle)
    if quantization is not None:
        config["quantization"] = quantization
    config.update(extra_config or {})
    write_checkpoint(Path(folder), config, named_parameters(eagle))

"""Gemma 4 assistants: small models that attend to entries of two layers of the target."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.assistant.network import MODEL_TYPES, Assistant, AssistantConfig
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.layer_sizes import build

NAME = "Gemma 4 assistant"
# Name of the token ids of the clusters.
ORDERING = "masked_embedding.token_ordering"
# Parts of names of tensors that are not read: entries are the target's, ranges are for training.
LEFT_OUT = re.compile(r"self_attn\.(k_proj|v_proj|k_norm)\.|(input|output)_(max|min)")


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") in MODEL_TYPES


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Assistant:
    """Load an assistant as Google or mlx-community publish it."""
    stored = Checkpoint(path_or_repo)
    config = AssistantConfig.from_dict(stored.config)
    target.check(config)
    names = {name: name for name in stored.shapes if not LEFT_OUT.search(name)}
    if config.ties_head:
        names = {name: name for name in names if "lm_head." not in name}
    return stored.fill(build(Assistant, config), names, lambda weights: _check(weights, config))


def _check(weights: dict[str, mx.array], config: AssistantConfig) -> None:
    """Check that the clusters hold every token once, which MLX would not; store int32."""
    if ORDERING not in weights:
        return
    ordering = weights[ORDERING]
    is_integer = mx.issubdtype(ordering.dtype, mx.integer)
    if not is_integer or sorted(to_ints(ordering)) != list(range(config.vocab_size)):
        raise CheckpointError(
            f"expected every id from 0 to {config.vocab_size - 1} once in {ORDERING}, found others;"
            " download it again"
        )
    weights[ORDERING] = ordering.astype(mx.int32)

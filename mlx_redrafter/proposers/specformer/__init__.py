"""SpecFormer: several tokens in one pass of its own, whatever the shape of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.proposers.specformer.config import MODEL_TYPE, SpecFormerConfig
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.proposers.target_facts import UNKNOWN, TargetFacts

NAME = "SpecFormer"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == MODEL_TYPE


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> SpecFormer:
    stored = Checkpoint(path_or_repo)
    config = SpecFormerConfig.from_dict(stored.config)
    target.check(config)
    return stored.fill(build(SpecFormer, config))

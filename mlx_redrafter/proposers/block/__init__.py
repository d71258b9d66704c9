"""Block drafters: DFlash, DFlash 2 and DSpark, which draft several tokens in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.proposers.block.config import MODEL_TYPE, BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.proposers.target_facts import UNKNOWN, TargetFacts

NAME = "block drafter"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == MODEL_TYPE


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> BlockNetwork:
    stored = Checkpoint(path_or_repo)
    config = BlockConfig.from_dict(stored.config)
    target.check(config)
    return stored.fill(build(BlockNetwork, config))

"""The recurrent drafter of ReDrafter (arXiv 2403.09919)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE, UNUSED_TENSORS, DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.precision import choose_precision

NAME = "recurrent drafter"
# Beginnings of the names of its own tensors.
SIGNS = ("rnn_u.", "rnn_w.", "lm_head.0.")

tune = choose_precision


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == MODEL_TYPE or any(name.startswith(SIGNS) for name in shapes)


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Drafter:
    stored = Checkpoint(path_or_repo)
    config = DrafterConfig.from_dict(stored.config)
    target.check(config)
    sources = {name: name for name in stored.shapes if name not in UNUSED_TENSORS}
    return stored.fill(Drafter(config), sources)

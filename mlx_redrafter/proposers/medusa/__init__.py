"""Medusa heads (arXiv 2401.10774): each proposes the tokens of one depth, all from one state."""

from pathlib import Path

from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.kind import UNKNOWN, TargetFacts
from mlx_redrafter.proposers.medusa.config import MODEL_TYPE, MedusaConfig
from mlx_redrafter.proposers.medusa.layouts import is_medusa, read_heads
from mlx_redrafter.proposers.medusa.network import Medusa

NAME = "Medusa heads"
recognise = is_medusa


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Medusa:
    """Load heads from a folder of this package, or from published safetensors files."""
    stored = Checkpoint(path_or_repo)
    if stored.config.get("model_type") == MODEL_TYPE:
        config, sources = MedusaConfig.from_dict(stored.config), None
    else:
        config, _, sources, _ = read_heads(stored.config, stored.shapes)
    target.check(config)
    return stored.fill(Medusa(config), sources)

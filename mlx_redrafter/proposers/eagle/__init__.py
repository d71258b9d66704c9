"""EAGLE heads (arXiv 2401.15077, 2406.16858, 2503.01840): decoder layers on the target's states."""

from pathlib import Path

from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import is_eagle, read_published
from mlx_redrafter.proposers.kind import UNKNOWN, TargetFacts
from mlx_redrafter.proposers.layer_sizes import build

NAME = "EAGLE head"
recognise = is_eagle


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Eagle:
    """Load a head as published in safetensors, or as `convert` writes it."""
    stored = Checkpoint(path_or_repo)
    config, names = read_published(stored.config, stored.shapes)
    target.check(config)
    return stored.fill(build(Eagle, config), names)

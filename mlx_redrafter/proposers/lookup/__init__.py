"""Prompt lookup: drafts from what the model has read and computed already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.lookup.contexts import Contexts
from mlx_redrafter.proposers.lookup.lookup import Lookup, LookupFirst
from mlx_redrafter.proposers.target_facts import UNKNOWN, TargetFacts

NAME = "prompt lookup"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Return False: prompt lookup has no checkpoints."""
    return False


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Lookup:
    """Make a new lookup; there is nothing to read."""
    return Lookup()


__all__ = ["NAME", "Contexts", "Lookup", "LookupFirst", "load", "recognise"]

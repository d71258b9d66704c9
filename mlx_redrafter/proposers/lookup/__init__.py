"""Prompt lookup: drafts from what the model has read and computed already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.lookup.contexts import Contexts
from mlx_redrafter.proposers.lookup.lookup import Lookup, LookupFirst

NAME = "prompt lookup"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return False


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Lookup:
    return Lookup()


__all__ = ["NAME", "Contexts", "Lookup", "LookupFirst", "load", "recognise"]

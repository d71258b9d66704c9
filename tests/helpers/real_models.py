"""The two published models of `bench/lab/real_models.py`, for tests that skip without them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter import load
from mlx_redrafter.bench.lab.real_models import Precision, RealModel, find_model
from mlx_redrafter.errors import RedrafterError

# Maximum time of a test that may be the first to ask for a model, in seconds.
FIRST_SECONDS = 900


@cache
def _find(model: RealModel, precision: Precision) -> Path | RedrafterError:
    """Return a folder, or why there is none; a failed download is not tried again."""
    try:
        return find_model(model, precision)
    except RedrafterError as error:
        return error


def real_folder(model: RealModel, precision: Precision = "float32") -> Path:
    """Return the folder of a published model; skips the test if it cannot be had."""
    folder = _find(model, precision)
    if isinstance(folder, RedrafterError):
        pytest.skip(str(folder))
    return folder


def real_pair(model: RealModel) -> tuple[Any, Any]:
    """Load a published model in float32, and its tokenizer; skips the test likewise."""
    target, tokenizer, _ = load(real_folder(model), drafter="lookup")
    return target, tokenizer

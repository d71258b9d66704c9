"""Fixtures of the parity tests."""

from __future__ import annotations

import sys

import pytest

import mlx_redrafter  # noqa: F401  # first: it prepares MLX's back end
from mlx_redrafter.target.architectures import ARCHITECTURES
from mlx_redrafter.target.model_parts import MLX_LM_MODELS
from tests.helpers.few_shapes import compile_passes, use_few_shapes


@pytest.fixture(autouse=True)
def _stock_functions() -> None:
    """Take the hooks of earlier tests off the functions of mlx-lm's model files."""
    for name, architecture in ARCHITECTURES.items():
        module = sys.modules.get(MLX_LM_MODELS + name)
        for function in architecture.functions:
            original = getattr(getattr(module, function, None), "__wrapped__", None)
            if original is not None:
                setattr(module, function, original)


@pytest.fixture(params=[False, True], ids=["", "few_shapes"])
def few_shapes_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trees attend to whole buckets, here of so few entries that short texts fill some.

    Every pass of a kind but the first is compiled.
    """
    if request.param:
        use_few_shapes(monkeypatch)
        compile_passes(monkeypatch, uses=2)

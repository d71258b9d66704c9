"""Fixtures of the parity tests."""

import sys

import pytest

import mlx_redrafter  # noqa: F401  # first: it prepares MLX's back end
from mlx_redrafter.target.architectures import ARCHITECTURES
from mlx_redrafter.target.model_parts import MLX_LM_MODELS


@pytest.fixture(autouse=True)
def _stock_functions() -> None:
    """Take the hooks of earlier tests off the functions of mlx-lm's model files."""
    for name, architecture in ARCHITECTURES.items():
        module = sys.modules.get(MLX_LM_MODELS + name)
        for function in architecture.functions:
            original = getattr(getattr(module, function, None), "__wrapped__", None)
            if original is not None:
                setattr(module, function, original)

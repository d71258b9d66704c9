"""The kernels' sources: those on record, and on an Apple GPU what its compiler makes of them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.kernels import trial
from mlx_redrafter.kernels.attention import AttentionShape
from mlx_redrafter.kernels.attention_trials import AttentionTrial
from mlx_redrafter.kernels.layers import layers_by_shape
from mlx_redrafter.kernels.product_trials import ProductTrial
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES
from mlx_redrafter.kernels.variant import BITS, DTYPES
from tests.golden import record_dense, record_small_t, record_tree_attention


def test_sources_are_those_on_record() -> None:
    for kernel in (record_dense, record_small_t, record_tree_attention):
        assert kernel.record() == kernel.FILE.read_text(encoding="utf-8")


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("kind", ["dense", "mxfp4", *BITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_on_an_apple_gpu(
    monkeypatch: pytest.MonkeyPatch, kind: str | int, dtype: str
) -> None:
    monkeypatch.setattr(trial, "load_or_time", lambda *args: args[-1]())
    model = nn.Sequential(nn.Linear(1024, 256), nn.Linear(416, 100), nn.Linear(1024, 32))
    model.set_dtype(DTYPES[dtype])
    if kind == "mxfp4":
        nn.quantize(model, 32, 4, mode="mxfp4")
    elif kind != "dense":
        nn.quantize(model, 32, kind)
    assert len(layers_by_shape(model)) == 3
    for shape, layers in layers_by_shape(model).items():
        tried = ProductTrial(shape, layers)
        assert tried.failure is None, f"{shape}: {tried.failure}"


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_equal_on_an_apple_gpu(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: str
) -> None:
    monkeypatch.setattr(trial, "load_or_time", lambda *args: args[-1]())
    assert AttentionTrial(AttentionShape(8, 2, size, dtype), 1).failure is None

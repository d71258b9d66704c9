"""A stand-in for an Apple GPU: the kernels in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.kernels import layers, small_t
from mlx_redrafter.kernels.source import SIMD_GROUPS, metal_source
from mlx_redrafter.kernels.variant import LANES, MatrixShape, Variant
from mlx_redrafter.policy import kernel_trials
from tests.kernels.emulator import Kernels


def emulated(pairs: Iterable[tuple[Variant, int]], **options: Any) -> Kernels:
    """The kernels of these variants and rows, compiled for the emulator."""
    return Kernels({pair: metal_source(*pair) for pair in pairs}, **options)


def run_emulated(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, order: int = 0) -> None:
    """Let `small_t` launch emulated kernels."""

    def launcher(variant: Variant, rows: int) -> Callable[..., list[mx.array]]:
        def launch(
            inputs: list[mx.array],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: list[tuple[int, int]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            assert (grid[0], grid[2], threadgroup) == (LANES, 1, (LANES, SIMD_GROUPS, 1))
            y = kernels.ours(variant, *inputs, groups=grid[1], order=order)
            assert (y.shape, y.dtype, rows) == (output_shapes[0], output_dtypes[0], y.shape[0])
            return [y]

        return launch

    monkeypatch.setattr(small_t, "_kernel", launcher)


def stand_in(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """A machine whose kernel for one row is MLX's for Apple GPUs, and that has ours.

    Its products of several rows are those of MLX's CPU back end, which adds up in another order.
    """
    multiply = mx.quantized_matmul

    def quantized_matmul(
        x: mx.array,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array,
        **format: Any,
    ) -> mx.array:
        inputs = x.shape[-1]
        dtype = str(scales.dtype).removeprefix("mlx.core.")
        shape = MatrixShape(format["bits"], format["group_size"], dtype, inputs, weight.shape[0])
        if x.size > inputs or not shape.is_offered:
            return multiply(x, weight, scales, biases, **format)
        y = kernels.stock(next(shape.variants()), x.reshape(1, -1), weight, scales, biases)
        return y.reshape(*x.shape[:-1], -1)

    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    for module in (layers, kernel_trials):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(kernel_trials, "load_or_measure", lambda *args: args[-1]())
    run_emulated(monkeypatch, kernels)

"""A stand-in for an Apple GPU: the kernels in the emulator.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.kernels import attention, layers, small_t, tree_attention, trials
from mlx_redrafter.kernels.tree_attention import (
    HEAD_SIZES,
    THREADS,
    AttentionVariant,
    attention_source,
)
from mlx_redrafter.kernels.variant import LANES, AnyVariant, DenseShape, MatrixShape, dtype_name
from tests.golden.record_metal import ATTENTION_VARIANTS
from tests.helpers.cli import Result, run
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import Kernels


def emulated(pairs: Iterable[tuple[AnyVariant, int]], **options: Any) -> Kernels:
    """The kernels of these variants and rows, compiled for the emulator."""
    return Kernels({pair: small_t.source_of(*pair) for pair in pairs}, **options)


Place = tuple[int, int, int]


def _launch(compute: Callable[[list[mx.array], Place, Place], mx.array]) -> Callable[..., Any]:
    """Return a launch that computes one output, of the shape and dtype that are asked for."""

    def launch(
        inputs: list[mx.array],
        grid: Place,
        threadgroup: Place,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        y = compute(inputs, grid, threadgroup)
        assert ([y.shape], [y.dtype]) == (output_shapes, output_dtypes)
        return [y]

    return launch


def run_emulated(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, order: int = 0) -> None:
    """Let `small_t` launch emulated kernels."""

    def kernel(variant: AnyVariant, rows: int) -> Callable[..., Any]:
        def compute(inputs: list[mx.array], grid: Place, threadgroup: Place) -> mx.array:
            groups = small_t.source_of(variant, rows).simd_groups
            assert (grid[0], grid[2], threadgroup) == (LANES, 1, (LANES, groups, 1))
            assert (grid[1] % groups, inputs[0].shape[0]) == (0, rows)
            return kernels.ours(variant, *inputs, groups=grid[1], order=order)

        return _launch(compute)

    monkeypatch.setattr(small_t, "_kernel", kernel)


def stand_in(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """A machine whose kernel for one row is MLX's for Apple GPUs, and that has ours.

    Its products of several rows are those of MLX's CPU back end, which adds up in another order.
    """
    multiply, add_product = mx.quantized_matmul, mx.addmm
    multiply_dense: Any = mx.array.__matmul__

    def quantized_matmul(
        x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, **format: Any
    ) -> mx.array:
        inputs, dtype = x.shape[-1], dtype_name(x.dtype)
        bits, size = format["bits"], format["group_size"]
        shape = MatrixShape(bits, size, dtype, inputs, weight.shape[0], format["mode"])
        if x.size > inputs or not shape.is_offered:
            return multiply(x, weight, scales, biases, **format)
        matrix = [weight, scales] if biases is None else [weight, scales, biases]
        y = kernels.stock(next(shape.variants()), x.reshape(1, -1), *matrix)
        return y.reshape(*x.shape[:-1], -1)

    def dense_row(x: mx.array, transposed: mx.array, *bias: mx.array) -> mx.array | None:
        """The product of one row; None for what is none, or has no kernel of ours."""
        shape = DenseShape(dtype_name(x.dtype), *transposed.shape[-2:])
        if transposed.ndim > 2 or x.size > shape.inputs or not shape.is_offered:
            return None
        y = kernels.stock(next(shape.variants()), x.reshape(1, -1), transposed.T, *bias)
        return y.reshape(*x.shape[:-1], -1)

    def matmul(x: mx.array, transposed: mx.array) -> mx.array:
        y = dense_row(x, transposed)
        return multiply_dense(x, transposed) if y is None else y

    def addmm(bias: mx.array, x: mx.array, transposed: mx.array) -> mx.array:
        y = dense_row(x, transposed, bias)
        return add_product(bias, x, transposed) if y is None else y

    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    monkeypatch.setattr(mx.array, "__matmul__", matmul)
    monkeypatch.setattr(mx, "addmm", addmm)
    for module in (layers, trials):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(trials, "load_or_time", lambda *args: args[-1]())
    run_emulated(monkeypatch, kernels)


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a compiler take no kernel of `small_t` or `tree_attention`."""
    error = "[metal::Device] Unable to build metal library from source\nerror: x"
    monkeypatch.setattr(module, "_kernel", Mock(side_effect=RuntimeError(error)))


def check_kernels(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: nn.Module,
    *options: str,
) -> Result:
    """Run ``check --kernels`` for a model, on a machine that has kernels."""

    def load(*_: object, kernels: bool, **__: object) -> tuple[nn.Module, None, None]:
        assert not kernels, "they are tried by the command itself"
        return model, None, None

    monkeypatch.setattr("mlx_redrafter.checkpoints.loading.load", load)
    monkeypatch.setattr(layers, "is_available", lambda: True)
    monkeypatch.setattr("mlx_redrafter.cli.model_options._check_memory", lambda *_: None)
    return run(capsys, "check", "--kernels", "--model", ".", "--drafter", "lookup", *options)


@cache
def emulated_attention() -> AttentionKernels:
    """Attention of all variants, compiled for the emulator once."""
    return AttentionKernels({one: attention_source(one) for one in ATTENTION_VARIANTS})


def run_emulated_attention(monkeypatch: pytest.MonkeyPatch, kernels: AttentionKernels) -> None:
    """Let `tree_attention` launch emulated kernels."""

    def kernel(variant: AttentionVariant) -> Callable[..., Any]:
        def compute(inputs: list[mx.array], grid: Place, threadgroup: Place) -> mx.array:
            *rows, parents, scale = inputs
            _, heads, nodes, head_size = rows[0].shape
            assert (grid, threadgroup) == ((heads * THREADS, nodes, 1), (THREADS, 1, 1))
            assert (parents.dtype, scale.dtype) == (mx.int32, mx.float32)
            assert variant.head_size == head_size
            return kernels.ours(*rows, parents=parents, scale=scale.item())

        return _launch(compute)

    monkeypatch.setattr(tree_attention, "_kernel", kernel)


def stand_in_attention(monkeypatch: pytest.MonkeyPatch, kernels: AttentionKernels) -> None:
    """A machine whose attention for one token is MLX's for Apple GPUs, and that has ours.

    Its attention for several tokens is that of MLX's CPU back end, which adds up in another order.
    """
    attend = mx.fast.scaled_dot_product_attention

    def scaled_dot_product_attention(*rows: mx.array, scale: float, **options: Any) -> mx.array:
        if rows[0].shape[2] > 1 or rows[0].shape[3] not in HEAD_SIZES:
            return attend(*rows, scale=scale, **options)
        assert options.get("mask") is None
        return kernels.stock(*rows, scale=scale)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", scaled_dot_product_attention)
    monkeypatch.setattr(attention, "is_available", lambda: True)
    monkeypatch.setattr(trials, "load_or_time", lambda *args: args[-1]())
    run_emulated_attention(monkeypatch, kernels)

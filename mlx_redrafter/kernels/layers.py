"""Layers with matrices, and the use of `small_t` in them.

A layer uses the kernel only while the target verifies a tree.

Axes: T rows of inputs, K inputs, N outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.kernels.small_t import small_t
from mlx_redrafter.kernels.variant import (
    DTYPES,
    WORD,
    AnyShape,
    AnyVariant,
    DenseShape,
    MatrixShape,
    dtype_name,
)
from mlx_redrafter.target.hooks import HookPoint, install, is_verifying

# Methods that multiply, by type of layer.
METHODS: dict[type[nn.Module], str] = {
    nn.Linear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedLinear: "__call__",
    nn.QuantizedEmbedding: "as_linear",
}
# Arrays of a matrix, in the order of the kernels' arguments.
MATRIX = ("weight", "scales", "biases")
# Package of mlx-lm's layers with adapters; the layers inside them keep MLX's kernels.
ADAPTERS = "mlx_lm.tuner."


@dataclass(frozen=True)
class ProductChoice:
    """Kernel of one layer, which replaces MLX's for the values ``rows`` of T."""

    shape: AnyShape
    variant: AnyVariant
    rows: tuple[int, ...]


def is_available() -> bool:
    """Whether MLX computes on an Apple GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def layers_by_shape(model: nn.Module) -> dict[AnyShape, list[nn.Module]]:
    """Group the layers that may use kernels by shape of their matrices, in the model's order."""
    modules = model.modules()[::-1]  # MLX begins with the last
    adapted = {
        id(inner)
        for module in modules
        if type(module).__module__.startswith(ADAPTERS)
        for inner in module.modules()
    }
    dtypes = {dtype_name(one.dtype) for one in named_parameters(model).values()} & DTYPES.keys()
    found: dict[AnyShape, list[nn.Module]] = {}
    for module in modules:
        if _stock_type(module) in METHODS and id(module) not in adapted:
            shape = _shape(module, dtypes)
            if shape is not None and shape.is_offered:
                found.setdefault(shape, []).append(module)
    return found


def stock_product(layer: nn.Module) -> Callable[[mx.array], mx.array]:
    """Return the layer's own method, from inputs of shape (..., K) to outputs (..., N)."""
    return cast(Any, getattr(layer, METHODS[_stock_type(layer)]))


def product(layer: nn.Module, x: mx.array, variant: AnyVariant) -> mx.array:
    """Compute by `small_t` what `stock_product` returns: x of shape (T, K) to shape (T, N)."""
    y = small_t(x, [layer[name] for name in MATRIX if name in layer], variant)
    return y + layer["bias"] if "bias" in layer else y


def use_product(layer: nn.Module, choice: ProductChoice) -> None:
    layer.redrafter_kernel = choice
    install(HookPoint(layer, METHODS[_stock_type(layer)], _multiply))


def choices(model: nn.Module) -> tuple[str, ...]:
    """List the kernels that a model uses, as a part of the key of its step times."""
    found = {repr(vars(module).get("redrafter_kernel")) for module in model.modules()}
    return tuple(sorted(found - {repr(None)}))


def _multiply(call: MethodType, x: mx.array) -> mx.array:
    layer = cast(Any, call.__self__)
    choice: ProductChoice = layer.redrafter_kernel
    rows = x.size // choice.shape.inputs
    dtype = DTYPES[choice.variant.dtype]
    if not is_verifying() or rows not in choice.rows or x.dtype != dtype or not is_available():
        return call(x)
    return product(layer, x.reshape(rows, -1), choice.variant).reshape(*x.shape[:-1], -1)


def _stock_type(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "redrafter_stock", type(module))


def _shape(layer: Any, dtypes: set[str]) -> AnyShape | None:
    """Return the shape of a layer's matrix, or None if its inputs may have several dtypes.

    ``dtypes`` are those of all floating-point parameters of the model.
    """
    outputs, columns = layer.weight.shape
    if "scales" not in layer:
        return DenseShape(dtype_name(layer.weight.dtype), columns, outputs)
    if "biases" in layer:
        dtypes = {dtype_name(layer.scales.dtype)}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    inputs = columns * WORD // layer.bits
    return MatrixShape(layer.bits, layer.group_size, dtype, inputs, outputs, layer.mode)

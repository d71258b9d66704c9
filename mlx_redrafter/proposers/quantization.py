"""Quantization of drafters: in place, as stored in a checkpoint, and what it is."""

from collections.abc import Collection
from typing import Any

import mlx.nn as nn

from mlx_redrafter.checks import check_choice
from mlx_redrafter.errors import CheckpointError, ConfigError

QUANTIZED_BITS = (2, 3, 4, 6, 8)
# Numbers that may share a scale in MLX.
QUANTIZED_GROUP_SIZES = (32, 64, 128)
# Ends of the names of layers that are too small, or too sensitive, to be quantised.
NEVER_QUANTISED = ("gate", "kernel_projection", "hidden_projection", "confidence_head.proj")
# Name of MLX's own codes, with a scale and a bias per group.
AFFINE = "affine"
# Group size and bits of MLX's floating-point codes, which have scales alone, by mode.
FLOAT_MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def quantization_of(network: nn.Module) -> dict[str, Any] | None:
    """Return the object ``quantization`` of a config for a network; None if it has none."""
    layer: Any = next((module for module in network.modules() if "scales" in module), None)
    if layer is None:
        return None
    sizes = {"group_size": layer.group_size, "bits": layer.bits}
    return sizes if layer.mode == AFFINE else {**sizes, "mode": layer.mode}


def quantize_drafter(drafter: nn.Module, bits: int, group_size: int) -> None:
    """Quantise the drafter's linear layers in place, except those of a width that does not divide.

    Some small layers stay as they are, too: routers of experts, whose rounding would change which
    experts they choose, and convolutions, selectors and estimates of block drafters.
    """
    check_quantization(bits, group_size)
    fitting = [
        name
        for name, module in drafter.named_modules()
        if hasattr(module, "to_quantized")
        and module.weight.shape[-1] % group_size == 0
        and not name.endswith(NEVER_QUANTISED)
    ]
    if not fitting:
        raise ConfigError(
            f"no layer of the drafter is a multiple of group_size {group_size} wide; "
            "use a smaller one or leave the drafter unquantised"
        )
    nn.quantize(drafter, group_size, bits, class_predicate=lambda name, _: name in fitting)


def quantize_as_stored(drafter: nn.Module, quantization: Any, stored: Collection[str]) -> None:
    """Quantise the layers whose stored weights are quantised, as ``config.json`` says."""
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f'expected "quantization" to be an object in config.json, got {quantization!r}'
        )
    mode: Any = quantization.get("mode", AFFINE)
    bits: Any = quantization.get("bits")
    group_size: Any = quantization.get("group_size")
    try:
        check_choice("quantisation mode", mode, (AFFINE, *FLOAT_MODES))
        if mode == AFFINE:
            check_quantization(bits, group_size)
        elif (group_size, bits) != FLOAT_MODES[mode]:
            raise ConfigError(
                f"quantisation mode {mode} needs group_size and bits {FLOAT_MODES[mode]}, got "
                f"{(group_size, bits)}"
            )
        nn.quantize(
            drafter,
            group_size,
            bits,
            mode=mode,
            class_predicate=lambda name, _: f"{name}.scales" in stored,
        )
    except ValueError as error:  # ConfigError is one
        raise CheckpointError(
            f"the drafter's config.json asks for a quantisation that does not fit: {error}"
        ) from error


def check_quantization(bits: Any, group_size: Any) -> None:
    """Raise `ConfigError` unless MLX can quantise so."""
    check_choice("quantisation bits", bits, QUANTIZED_BITS)
    check_choice("quantisation group_size", group_size, QUANTIZED_GROUP_SIZES)

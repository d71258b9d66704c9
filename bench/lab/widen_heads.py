"""Zero-padded growth of heads that read the target's states; see `widen`.

A head for a wider target is as large as one that is made for it: more attention heads of the same
width, and more neurons. All weights that the small one lacks are zero.

Axes: H hidden size of the small target, C of its states that are read beside each other, r rank of
a block drafter's link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.checkpoint_files import (
    find_checkpoint,
    named_parameters,
    read_config,
    write_checkpoint,
)
from mlx_redrafter.convert.publication import check_output, publish
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers import block
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle import load as load_eagle
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.medusa import load as load_medusa
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.quantization import quantization_of
from mlx_redrafter.proposers.specformer import load as load_specformer
from mlx_redrafter.proposers.specformer.network import SpecFormer

# Layers that read no states, but what is within the head.
INNER = ("down_proj", "o_proj")
# Layers of block drafters that read a state of H numbers and then r numbers of the link.
STATE_FIRST = ("confidence_head.proj.weight", "markov_head.gate_proj.weight")
# Layers of block drafters that read them in the other order.
STATE_LAST = ("markov_head.joint_proj.weight",)
# Convolutions of DFlash 2.
CONVOLUTIONS = ("attention_conv", "mlp_conv")
# Layers that give several states beside each other.
SLOTS = ("positional",)
# A widened network, and what writes it to a folder.
Widened = tuple[nn.Module, Callable[[Path], None]]


def widen_head(kind: str, source: str | Path, destination: Path, hidden_size: int) -> None:
    """Write a float32 copy of a head for the widened target; it proposes the same drafts.

    Args:
        kind: Kind of the head.
        source: Folder or hub repository of the small target's head.
        destination: Folder to write.
        hidden_size: Hidden size of the widened target.

    Raises:
        ConfigError: There is something in ``destination``, the head is quantised, or its attention
            heads do not fit into the hidden size.
    """
    if kind not in KINDS:
        raise ConfigError(f"a {kind} cannot be widened; use a head that reads the target's states")
    folder = find_checkpoint(source)
    check_output(destination, folder)
    network, save = KINDS[kind](folder, hidden_size)
    mx.eval(network.parameters())
    with publish(destination) as staging:
        save(staging)


def _widen_medusa(folder: Path, hidden_size: int) -> Widened:
    old = load_medusa(folder)
    new = Medusa(replace(old.config, hidden_size=hidden_size))
    _fill(old, new, old.config.hidden_size, hidden_size)

    def save(staging: Path) -> None:
        write_checkpoint(staging, new.config.to_dict(), named_parameters(new))

    return new, save


def _widen_eagle(folder: Path, hidden_size: int) -> Widened:
    old = load_eagle(folder)
    config = old.config
    sizes = _layer_sizes(vars(config), hidden_size)
    new = Eagle(replace(config, **sizes))
    _fill(old, new, config.hidden_size, hidden_size)
    return new, partial(save_drafter, new)


def _widen_specformer(folder: Path, hidden_size: int) -> Widened:
    old = load_specformer(folder)
    config = old.config
    new = SpecFormer(replace(config, **_layer_sizes(vars(config), hidden_size)))
    _fill(old, new, config.hidden_size, hidden_size)
    return new, partial(save_drafter, new)


def _widen_mtp(folder: Path, hidden_size: int) -> Widened:
    old, values = load_mtp(folder), read_config(folder)
    sizes = _layer_sizes(values, hidden_size)
    values = {**values, **sizes}
    new = Mtp(values)
    _fill(old, new, old.config.hidden_size, hidden_size)
    return new, partial(save_drafter, new)


def _widen_block(folder: Path, hidden_size: int) -> Widened:
    old = block.load(folder)
    config = old.config
    sizes: dict[str, Any] = {**_layer_sizes(vars(config), hidden_size), "num_target_layers": None}
    if config.conv_groups:
        size = math.gcd(config.hidden_size // config.conv_groups, hidden_size)
        sizes["conv_groups"] = hidden_size // size
    new = BlockNetwork(replace(config, **sizes))
    _fill(old, new, config.hidden_size, hidden_size)
    for narrow, wide in zip(old.layers, new.layers, strict=True):
        for name in CONVOLUTIONS if config.conv_groups else ():
            weight = narrow[name].kernel_projection.weight
            wide[name].kernel_projection.weight = _place_kernels(weight, config, new.config)
    return new, partial(save_drafter, new)


def _place_kernels(weight: mx.array, old: BlockConfig, new: BlockConfig) -> mx.array:
    """Give each smaller group of channels the kernel of the group that it was part of."""
    kernels = np.array(weight.astype(mx.float32)).reshape(-1, old.conv_groups, old.hidden_size)
    placed = np.zeros((len(kernels), new.conv_groups, new.hidden_size), np.float32)
    starts = np.arange(new.conv_groups) * (new.hidden_size // new.conv_groups)
    is_used = starts < old.hidden_size
    groups = starts[is_used] // (old.hidden_size // old.conv_groups)
    placed[:, is_used, : old.hidden_size] = kernels[:, groups]
    return mx.array(placed.reshape(-1, new.hidden_size))


def _layer_sizes(values: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Sizes of a decoder layer for a wider hidden state, as configs name them."""
    growth = hidden_size / values["hidden_size"]
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    is_even = hidden_size % head_dim == 0
    if not is_even or values["num_attention_heads"] != values["num_key_value_heads"]:
        raise ConfigError(
            f"expected as many heads of keys as of queries, and a hidden size that is a multiple "
            f"of their width, found {values['num_attention_heads']} and "
            f"{values['num_key_value_heads']} of {head_dim}, and {hidden_size}; widen to another "
            "size"
        )
    heads = hidden_size // head_dim
    return {
        "hidden_size": hidden_size,
        "intermediate_size": round(growth * values["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": values["rms_norm_eps"] / growth,
    }


def _fill(old: nn.Module, new: nn.Module, hidden: int, wide: int) -> None:
    """Put the weights of a network into a wider one.

    Raises:
        ConfigError: The old one is quantised.
    """
    if quantization_of(old) is not None:
        raise ConfigError("a quantised head cannot be widened; use the one it was made from")
    weights = []
    shapes = named_parameters(new)
    for name, tensor in named_parameters(old).items():
        if name == "token_ids":
            weights.append((name, tensor))
            continue
        value = np.array(tensor.astype(mx.float32))
        placed = np.zeros(shapes[name].shape, np.float32)
        layer = name.split(".")[-2]
        rows = _places(len(value), hidden, wide) if layer in SLOTS else np.arange(len(value))
        if placed.shape == value.shape:
            placed = value
        elif value.ndim == 3:
            placed[..., :hidden] = value
        elif layer in INNER:
            placed[rows, : value.shape[1]] = value
        elif value.ndim == 2 and layer != "kernel_projection":
            placed[rows[:, None], _inputs(name, value.shape[1], hidden, wide)] = value
        elif value.ndim == 1:
            placed[rows] = value / math.sqrt(wide / hidden) if "norm" in name else value
        weights.append((name, mx.array(placed)))
    new.load_weights(weights)
    new.eval()


def _inputs(name: str, size: int, hidden: int, wide: int) -> np.ndarray[Any, Any]:
    """Places of the inputs of a layer in those of the wider one."""
    inputs = np.arange(size)
    if name in STATE_FIRST:
        return np.where(inputs < hidden, inputs, inputs + wide - hidden)
    return inputs if name in STATE_LAST else _places(size, hidden, wide)


def _places(size: int, hidden: int, wide: int) -> np.ndarray[Any, Any]:
    """Places of C states, the inputs of a layer, in those of the wider one."""
    return (np.arange(size // hidden)[:, None] * wide + np.arange(hidden)).flatten()


KINDS: Mapping[str, Callable[[Path, int], Widened]] = {
    block.NAME: _widen_block,
    "Medusa heads": _widen_medusa,
    "EAGLE head": _widen_eagle,
    "MTP module": _widen_mtp,
    "SpecFormer": _widen_specformer,
}

"""Zero-padded growth of Medusa heads, EAGLE heads, SpecFormers and MTP modules; see `widen`.

A head for a wider target is as large as one that is made for it: more attention heads of the same
width, and more neurons. All weights that the small one lacks are zero.

Axes: H hidden size of the small target, C of its states that are read beside each other.
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
from mlx_redrafter.convert.publication import check_new, publish
from mlx_redrafter.errors import ConfigError
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
        CheckpointError: There is something in ``destination``.
        ConfigError: The head is quantised, or its attention heads do not fit into the hidden size.
    """
    if kind not in KINDS:
        raise ConfigError(f"a {kind} cannot be widened; use a head that reads the target's states")
    folder = find_checkpoint(source)
    check_new(destination, folder)
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
        if layer in INNER:
            placed[rows, : value.shape[1]] = value
        elif value.ndim == 2:
            placed[rows[:, None], _places(value.shape[1], hidden, wide)] = value
        else:
            is_wider_norm = "norm" in name and placed.shape != value.shape
            placed[rows] = value / math.sqrt(wide / hidden) if is_wider_norm else value
        weights.append((name, mx.array(placed)))
    new.load_weights(weights)
    new.eval()


def _places(size: int, hidden: int, wide: int) -> np.ndarray[Any, Any]:
    """Places of C states, the inputs of a layer, in those of the wider one."""
    return (np.arange(size // hidden)[:, None] * wide + np.arange(hidden)).flatten()


KINDS: Mapping[str, Callable[[Path, int], Widened]] = {
    "Medusa heads": _widen_medusa,
    "EAGLE head": _widen_eagle,
    "MTP module": _widen_mtp,
    "SpecFormer": _widen_specformer,
}

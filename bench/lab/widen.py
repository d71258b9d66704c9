"""Zero-padded growth of a small trained Llama, and of its drafter, that computes the same.

For speed work without a large model: text and acceptance are the small model's, memory traffic and
arithmetic those of a large one. No measurement on a widened model says anything about the quality
of a model of that size.

The widened hidden state is the small one followed by zeros. With k the growth of the hidden size,
a norm over it computes the old values if its weight is divided by sqrt(k) and its epsilon by k.
Weights that write into the zeros are zero, new heads, neurons and layers have no output, and
weights that only meet zeros, or whose results are dropped, are arbitrary.

Axes: H hidden size, D size of a head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlx_redrafter.bench.lab.llama_shape import LlamaShape, widened_shape
from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    find_checkpoint,
    read_config,
    read_tensors,
    write_checkpoint,
)
from mlx_redrafter.convert.publication import check_output, publish
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.checkpoint import write_drafter
from mlx_redrafter.proposers.quantization import quantization_of
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter

# Standard deviation of arbitrary weights; any finite one would do.
NOISE = 0.02

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


def widen_target(
    source: str | Path,
    destination: str | Path,
    num_parameters: int,
    num_layers: int | None = None,
) -> LlamaShape:
    """Write a widened float32 copy of a Llama checkpoint, tokenizer files included.

    Args:
        source: Checkpoint folder or hub repository of the small model.
        destination: Folder to write.
        num_parameters: Approximate number of parameters of the copy.
        num_layers: Layers of the copy, by default the small model's; new ones come last.

    Returns:
        The shape of the copy.

    Raises:
        CheckpointError: The model is not a plain Llama, or its files are damaged.
        ConfigError: The model does not fit into ``num_parameters`` and ``num_layers``, or there is
            something in ``destination``.
    """
    folder, destination = find_checkpoint(source), Path(destination)
    check_output(destination, folder)
    config = read_config(folder)
    old = LlamaShape.from_config(config)
    keep_heads = bool(config.get("rope_scaling"))
    new = widened_shape(old, num_parameters, num_layers, keep_heads)
    growth = new.hidden_size / old.hidden_size
    sizes = {key: value for key, value in vars(new).items() if key != "vocab_size"}
    config = {
        **config,
        **sizes,
        "rms_norm_eps": config["rms_norm_eps"] / growth,
        "torch_dtype": "float32",
        "widened_from": {"parameters": old.num_parameters, **vars(old)},
    }
    tensors = _Widening(old, new, np.random.default_rng(0)).tensors(read_tensors(folder))
    with publish(destination) as staging:
        write_checkpoint(staging, config, dict(tensors))
        copy_tokenizer(folder, staging)
    return new


def widen_drafter(
    source: str | Path,
    destination: str | Path,
    hidden_size: int,
) -> DrafterConfig:
    """Write a float32 copy of a drafter for the widened target; it proposes the same drafts.

    Args:
        source: Folder or hub repository of the small target's drafter.
        destination: Folder to write.
        hidden_size: Hidden size of the widened target.

    Returns:
        The copy's config.

    Raises:
        ConfigError: There is something in ``destination``, or the drafter is quantised, or wider
            than the target.
    """
    folder, destination = find_checkpoint(source), Path(destination)
    check_output(destination, folder)
    drafter = load_drafter(folder)
    widened = widened_drafter(drafter, hidden_size)
    with publish(destination) as staging:
        write_drafter(widened, staging, {"widened_from": drafter.config.to_dict()})
    return widened.config


def widened_drafter(drafter: Drafter, hidden_size: int) -> Drafter:
    """Make a drafter that computes the same from a hidden state that ends in zeros."""
    old = drafter.config
    if quantization_of(drafter) is not None:
        raise ConfigError("a quantised drafter cannot be widened; use the one it was made from")
    if hidden_size < old.hidden_size:
        raise ConfigError(f"hidden_size must be at least {old.hidden_size}, got {hidden_size}")
    rng = np.random.default_rng(0)
    hidden = np.arange(old.hidden_size)
    pair = np.concatenate([hidden, hidden + hidden_size])  # places of [h, s] in [h, 0, s, 0]
    exit_dim = old.exit_dim if old.has_input_proj else 2 * hidden_size
    inner = np.arange(old.exit_dim) if old.has_input_proj else pair
    new = dataclasses.replace(old, hidden_size=hidden_size, exit_dim=exit_dim)
    weights = []
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(drafter.parameters()))
    for name, tensor in parameters:
        if name == "token_ids":
            weights.append((name, tensor))
            continue
        value = np.array(tensor.astype(mx.float32))
        if name.startswith("rnn_"):
            rows, columns, size = hidden, hidden, (hidden_size, hidden_size)
        elif name.startswith("input_proj"):
            rows, columns, size = inner, pair, (exit_dim, 2 * hidden_size)
        elif name.startswith(f"lm_head.{old.num_draft_layers}."):
            rows, columns, size = np.arange(old.head_rows), inner, (old.head_rows, exit_dim)
        else:
            rows, columns, size = inner, inner, (exit_dim, exit_dim)
        weights.append((name, mx.array(_place(value, rows, columns, size, rng))))
    widened = Drafter(new)
    widened.load_weights(weights)
    widened.eval()
    return widened


def _place(
    value: Array, rows: Indices, columns: Indices, size: tuple[int, int], rng: np.random.Generator
) -> Array:
    """Place ``value`` at ``rows`` x ``columns`` of a matrix (or bias) whose other inputs are zero.

    Other rows get no contribution from ``columns``: their output is zero.
    """
    if value.ndim == 1:
        bias = np.zeros(size[0], dtype=np.float32)
        bias[rows] = value
        return bias
    placed = _noise(rng, size)
    placed[:, columns] = 0
    placed[np.ix_(rows, columns)] = value
    return placed


def _noise(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.standard_normal(size, dtype=np.float32) * np.float32(NOISE)


class _Widening:
    """Places of an old model's weights in a new one."""

    def __init__(self, old: LlamaShape, new: LlamaShape, rng: np.random.Generator):
        self.old, self.new, self.rng = old, new, rng
        self.hidden = np.arange(old.hidden_size)
        self.neurons = np.arange(old.intermediate_size)
        # A head m times as large rotates its pair m * i like the old head its pair i.
        step = new.head_dim // old.head_dim
        half = step * np.arange(old.head_dim // 2)
        rotated = np.concatenate([half, half + new.head_dim // 2])
        self.query_scale = math.sqrt(step)  # attention divides by sqrt(D)
        self.queries = self._rows(old.num_attention_heads, rotated)
        self.keys = self._rows(old.num_key_value_heads, rotated)
        self.values = self._rows(old.num_key_value_heads, np.arange(old.head_dim))
        self.outputs = self._rows(old.num_attention_heads, np.arange(old.head_dim))

    def tensors(self, tensors: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
        """Names and float32 weights of the new model."""
        old, new = self.old, self.new
        for name in ("model.embed_tokens", "lm_head"):
            weight = tensors.get(f"{name}.weight")
            if weight is not None:
                rows = np.arange(old.vocab_size)
                free = name == "lm_head"
                size = (new.vocab_size, new.hidden_size)
                yield f"{name}.weight", self._matrix(weight, rows, self.hidden, size, free)
        yield "model.norm.weight", self._norm(tensors["model.norm.weight"])
        for i in range(new.num_hidden_layers):
            prefix = f"model.layers.{i}."
            layer = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            for name, tensor in self._layer(layer):
                yield prefix + name, tensor

    def _layer(self, layer: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
        """Widen one layer; without old weights, make a layer that adds nothing."""
        new = self.new
        hidden, neurons = new.hidden_size, new.intermediate_size
        heads, groups = (
            number * new.head_dim for number in (new.num_attention_heads, new.num_key_value_heads)
        )
        for name, rows, columns, size, is_free in (
            ("self_attn.q_proj", self.queries, self.hidden, (heads, hidden), True),
            ("self_attn.k_proj", self.keys, self.hidden, (groups, hidden), True),
            ("self_attn.v_proj", self.values, self.hidden, (groups, hidden), True),
            ("self_attn.o_proj", self.hidden, self.outputs, (hidden, heads), False),
            ("mlp.gate_proj", self.neurons, self.hidden, (neurons, hidden), True),
            ("mlp.up_proj", self.neurons, self.hidden, (neurons, hidden), True),
            ("mlp.down_proj", self.hidden, self.neurons, (hidden, neurons), False),
        ):
            weight = layer.get(f"{name}.weight")
            yield f"{name}.weight", self._matrix(weight, rows, columns, size, is_free, name)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self._norm(layer.get(name))

    def _matrix(
        self,
        weight: mx.array | None,
        rows: Indices,
        columns: Indices,
        size: tuple[int, int],
        is_free: bool,
        name: str = "",
    ) -> mx.array:
        """Place the old matrix inside arbitrary weights (``is_free``) or inside zeros."""
        placed = _noise(self.rng, size) if is_free else np.zeros(size, dtype=np.float32)
        if weight is not None:
            old = np.array(weight.astype(mx.float32))
            if name == "self_attn.q_proj":
                # New places in old heads must not reach the scores, whatever the keys have there.
                placed[: self.old.num_attention_heads * self.new.head_dim] = 0
                old = old * np.float32(self.query_scale)
            placed[np.ix_(rows, columns)] = old
        return mx.array(placed)

    def _norm(self, weight: mx.array | None) -> mx.array:
        placed = np.ones(self.new.hidden_size, dtype=np.float32)
        if weight is not None:
            placed[self.hidden] = np.array(weight.astype(mx.float32))
        return mx.array(placed / np.float32(math.sqrt(self.new.hidden_size / self.old.hidden_size)))

    def _rows(self, num_heads: int, places: Indices) -> Indices:
        starts = np.arange(num_heads) * self.new.head_dim
        return (starts[:, None] + places).reshape(-1)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy what belongs to a checkpoint besides weights and config: small files, no READMEs."""
    for path in sorted(source.iterdir()):
        skipped = path.name == CONFIG_FILE or path.suffix in (".safetensors", ".md", ".bin")
        if path.is_file() and not skipped and not path.name.endswith(".index.json"):
            shutil.copyfile(path, destination / path.name)

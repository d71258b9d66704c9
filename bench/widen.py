"""Widen a small trained Llama, and its drafter, without changing what they compute.

For speed work where no large model is at hand: text and acceptance are the small model's, memory
traffic and arithmetic those of a large one. Nothing that is measured on a widened model says
anything about the quality of a model of that size. Only a longer context changes what is computed.

The widened hidden state is the small one followed by zeros. With k the growth of the hidden size,
a norm over it computes the old values when its weight is divided by sqrt(k) and its epsilon by k.
Whatever writes into the zeros is zero, heads, neurons and layers that are new have no output, and
weights that only ever meet zeros, or whose result is dropped, are arbitrary.

Axes: H hidden size, D size of a head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlx_redrafter.checkpoint import (
    CONFIG_FILE,
    find_checkpoint,
    read_config,
    read_tensors,
    write_atomically,
    write_checkpoint,
)
from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.redrafter.checkpoint import load_drafter, save_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter

# New sizes are multiples of it, and heads smaller than it are widened towards it.
ALIGNMENT = 64
# Standard deviation of arbitrary weights; only its being finite matters.
NOISE = 0.02
# RoPE's base in a config that names none, as mlx-lm's Llama reads it.
ROPE_THETA = 10000.0

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, named as in its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Read a ``config.json``.

        Raises:
            CheckpointError: It is no plain Llama: another architecture, quantised, or with biases.
        """
        found = config.get("model_type")
        if found != "llama":
            raise CheckpointError(f"only model_type 'llama' can be widened, found {found!r}")
        for key in ("quantization", "attention_bias", "mlp_bias", "sliding_window"):
            if config.get(key):
                raise CheckpointError(
                    f"a model with {key} cannot be widened; use an unquantised plain Llama"
                )
        heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", True),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied head counts once."""
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size + 2)
        embeddings = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        return layer * self.num_hidden_layers + self.hidden_size * (embeddings + 1)


def widened_shape(
    old: LlamaShape, num_parameters: int, num_layers: int | None = None, keep_heads: bool = False
) -> LlamaShape:
    """The shape nearest to a number of parameters that contains the old one.

    Args:
        old: The small model's.
        num_parameters: Wanted, at least the small model's.
        num_layers: Wanted, by default as many as there are.
        keep_heads: Do not enlarge the heads themselves.

    Raises:
        ConfigError: The small model does not fit into that.
    """
    layers = old.num_hidden_layers if num_layers is None else num_layers
    if layers < old.num_hidden_layers:
        raise ConfigError(
            f"layers must be at least the model's {old.num_hidden_layers}, got {layers}"
        )
    repeats = old.num_attention_heads // old.num_key_value_heads
    head_dim = old.head_dim * (1 if keep_heads else max(1, ALIGNMENT // old.head_dim))

    def with_hidden_size(hidden_size: int) -> LlamaShape:
        groups = hidden_size // (head_dim * repeats)
        neurons = old.intermediate_size * hidden_size / old.hidden_size
        return dataclasses.replace(
            old,
            hidden_size=hidden_size,
            intermediate_size=max(old.intermediate_size, round(neurons / ALIGNMENT) * ALIGNMENT),
            num_hidden_layers=layers,
            num_attention_heads=groups * repeats,
            num_key_value_heads=groups,
            head_dim=head_dim,
        )

    # Whole heads fill the hidden state; transformers, which loads the tokenizer, insists on it.
    step = math.lcm(ALIGNMENT, head_dim * repeats)
    size = -(-max(old.hidden_size, old.num_attention_heads * head_dim) // step) * step
    best = with_hidden_size(size)
    if best.num_parameters > 2 * num_parameters:
        raise ConfigError(
            f"the widened model has at least {best.num_parameters} parameters, got "
            f"{num_parameters}; ask for more"
        )
    while best.num_parameters < num_parameters:
        previous, size = best, size + step
        best = with_hidden_size(size)
        if num_parameters - previous.num_parameters < best.num_parameters - num_parameters:
            best = previous
            break
    missing = num_parameters - best.num_parameters
    neurons = best.intermediate_size + missing / (3 * best.hidden_size * layers)
    neurons = max(old.intermediate_size, round(neurons / ALIGNMENT) * ALIGNMENT)
    return dataclasses.replace(best, intermediate_size=neurons)


def widen_target(
    source: str | Path,
    destination: str | Path,
    num_parameters: int,
    num_layers: int | None = None,
    context_length: int | None = None,
    seed: int = 0,
) -> LlamaShape:
    """Write a widened float32 copy of a Llama checkpoint, tokenizer files included.

    Args:
        source: Checkpoint folder or hub repository of the small model.
        destination: Folder to write.
        num_parameters: About how many the copy gets.
        num_layers: Layers of the copy, by default as many as there are; new ones come last.
        context_length: Replaces ``max_position_embeddings``. Where it is larger, RoPE's base grows
            with it, so that the text goes on meaning something: the copy no longer computes
            exactly what the small model does.
        seed: Of the arbitrary weights.

    Returns:
        The shape of the copy.

    Raises:
        CheckpointError: The model is no plain Llama, or its files are damaged.
        ConfigError: It does not fit into ``num_parameters`` and ``num_layers``.
    """
    folder = find_checkpoint(source)
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
        **_longer_context(config, old.head_dim, context_length),
        "torch_dtype": "float32",
        "widened_from": {"parameters": old.num_parameters, **vars(old)},
    }
    tensors = _Widening(old, new, np.random.default_rng(seed)).tensors(read_tensors(folder))
    write_checkpoint(Path(destination), config, dict(tensors))
    _copy_tokenizer(folder, Path(destination))
    return new


def _longer_context(
    config: Mapping[str, Any], head_dim: int, context_length: int | None
) -> dict[str, Any]:
    """Config of a model for s times the context, without training.

    The base of RoPE times s ** (D / (D - 2)) leaves the fastest pair as it is and slows the slowest
    down by s ("NTK-aware" interpolation; YaRN, arXiv 2309.00071, section 3.1).
    """
    trained = config.get("max_position_embeddings")
    if context_length is None or trained is None:
        return {"max_position_embeddings": context_length or trained}
    growth = max(1.0, context_length / trained) ** (head_dim / (head_dim - 2))
    return {
        "max_position_embeddings": context_length,
        "rope_theta": config.get("rope_theta", ROPE_THETA) * growth,
    }


def widen_drafter(
    source: str | Path,
    destination: str | Path,
    hidden_size: int,
    exit_dim: int | None = None,
    seed: int = 0,
) -> DrafterConfig:
    """Write a float32 copy of a drafter for the widened target; it proposes the same drafts.

    Args:
        source: Folder or hub repository of the small target's drafter.
        destination: Folder to write.
        hidden_size: Of the widened target.
        exit_dim: Of the copy, by default the drafter's own; one that is twice the hidden size stays
            so.
        seed: Of the arbitrary weights.

    Returns:
        The copy's config.

    Raises:
        ConfigError: The drafter is quantised, or wider than the target or ``exit_dim``.
    """
    drafter = load_drafter(source)
    widened = widened_drafter(drafter, hidden_size, exit_dim, seed)
    extra = {"widened_from": drafter.config.to_dict()}
    save_drafter(widened, destination, extra)
    return widened.config


def widened_drafter(
    drafter: Drafter, hidden_size: int, exit_dim: int | None = None, seed: int = 0
) -> Drafter:
    """A drafter of the same function for a hidden state that ends in zeros; see `widen_drafter`."""
    old = drafter.config
    if drafter.quantization is not None:
        raise ConfigError("a quantised drafter cannot be widened; use the one it was made from")
    if hidden_size < old.hidden_size:
        raise ConfigError(f"hidden_size must be at least {old.hidden_size}, got {hidden_size}")
    rng = np.random.default_rng(seed)
    hidden = np.arange(old.hidden_size)
    pair = np.concatenate([hidden, hidden + hidden_size])  # places of [h, s] in [h, 0, s, 0]
    exit_dim = _widened_exit_dim(old, hidden_size, exit_dim)
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


def _widened_exit_dim(old: DrafterConfig, hidden_size: int, wanted: int | None) -> int:
    if not old.has_input_proj:
        if wanted not in (None, 2 * hidden_size):
            raise ConfigError(
                f"the drafter has no input_proj, so its copy's exit_dim is {2 * hidden_size}, got "
                f"{wanted}; leave it out"
            )
        return 2 * hidden_size
    exit_dim = old.exit_dim if wanted is None else wanted
    if exit_dim < old.exit_dim or exit_dim == 2 * hidden_size:
        raise ConfigError(
            f"exit_dim must be at least {old.exit_dim} and not {2 * hidden_size}, got {exit_dim}"
        )
    return exit_dim


def _place(
    value: Array, rows: Indices, columns: Indices, size: tuple[int, int], rng: np.random.Generator
) -> Array:
    """A matrix (or bias) with ``value`` at ``rows`` x ``columns``; other inputs are zero for sure.

    Rows that are not named get no contribution from ``columns``: their output is zero.
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
    """Where the weights of an old model go in a new one."""

    def __init__(self, old: LlamaShape, new: LlamaShape, rng: np.random.Generator):
        self.old, self.new, self.rng = old, new, rng
        self.hidden = np.arange(old.hidden_size)
        self.neurons = np.arange(old.intermediate_size)
        # A head that is m times as large rotates its pair m i as the old one its pair i.
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
        """One layer; with no old weights one that adds nothing."""
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
        """The old matrix inside arbitrary weights (``is_free``) or zeros."""
        placed = _noise(self.rng, size) if is_free else np.zeros(size, dtype=np.float32)
        if weight is not None:
            old = np.array(weight.astype(mx.float32))
            if name == "self_attn.q_proj":
                # New places in old heads must not reach the scores, whatever the keys hold there.
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


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy what belongs to a checkpoint besides weights and config: small files, no READMEs."""
    for path in sorted(source.iterdir()):
        skipped = path.name == CONFIG_FILE or path.suffix in (".safetensors", ".md", ".bin")
        if path.is_file() and not skipped and not path.name.endswith(".index.json"):
            write_atomically(
                destination / path.name,
                lambda temporary, path=path: shutil.copyfile(path, temporary),  # type: ignore[misc]
            )

"""Decoder layers over a block of entries, and links of its drafts.

Axes: M blocks, B entries of a block, n verified tokens, H hidden size, D head size, W beams, r rank
of a link, V rows of the head, K candidates.

Layers keep keys and values of verified tokens only, which depend on the target's states alone.
Entries of a block attend to them and to each other.

A link scores tokens by the draft before: it adds ``<feature(p, h, s), table[t]>`` to the logit of
token t after token p. Here h is the block's output at the depth of t, and s a state of the beam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gemma4_text import geglu
from mlx_lm.models.rope_utils import initialize_rope

from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.draft_network import GatedMlp
from mlx_redrafter.proposers.layer_sizes import complete_yarn


class Surroundings(Protocol):
    """The entries that blocks attend to, and the positions of the blocks."""

    @property
    def offset(self) -> int | mx.array:
        """Position of each block's first entry: an int, or int32 of shape (M,)."""

    def attend(self, attention: BlockAttention, queries: mx.array, x: mx.array) -> mx.array:
        """Compute one layer's attention of blocks to verified tokens and to themselves.

        Queries are rotated, shape (M, query heads, B, D), as is the result; ``x`` are the inputs of
        the blocks, shape (M, B, H).
        """


def new_rope(config: BlockConfig) -> nn.Module:
    rope: nn.Module = initialize_rope(
        config.rope_dims or config.head_size,
        config.rope_theta,
        config.rope_traditional,
        dict(config.rope_scaling) if config.rope_scaling is not None else None,
        config.max_position_embeddings,
    )
    complete_yarn(rope, config)
    return rope


class BlockAttention(nn.Module):
    def __init__(self, config: BlockConfig, index: int):
        super().__init__()
        self.config, self.index = config, index
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.scale = 1.0 if config.layer_type == "gemma4" else size**-0.5
        self.q_proj = nn.Linear(hidden, heads * size * (1 + config.is_gated), bias=bias)
        self.k_proj = nn.Linear(hidden, groups * size, bias=bias)
        if config.has_values:
            self.v_proj = nn.Linear(hidden, groups * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        if config.has_sinks:
            self.attention_sink_bias = mx.zeros((heads,))
        self.rope = new_rope(config)

    @property
    def sinks(self) -> mx.array | None:
        """Logits of the sinks, shape (query heads,); None without them."""
        return self.get("attention_sink_bias")

    def keys_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Compute rotated keys, and values, of rows from a position on, shape (M, n, H)."""
        config = self.config
        shape = (*x.shape[:2], config.num_key_value_heads, config.head_size)
        keys = self.k_proj(x).reshape(shape)
        values = self.v_proj(x).reshape(shape) if config.has_values else keys
        if config.layer_type == "gemma4":
            values = mx.fast.rms_norm(values, None, config.rms_norm_eps)
        if config.value_scale != 1:
            values = values * config.value_scale
        keys = self.k_norm(keys).transpose(0, 2, 1, 3)
        return self.rope(keys, offset=offset), values.transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, around: Surroundings) -> mx.array:
        """Compute outputs of blocks, shape (M, B, H)."""
        q = self.q_proj(x).reshape(*x.shape[:2], self.config.num_attention_heads, -1)
        gate = None
        if self.config.is_gated:
            q, gate = mx.split(q, 2, axis=-1)
        q = self.rope(self.q_norm(q).transpose(0, 2, 1, 3), offset=around.offset)
        out = around.attend(self, q, x)
        out = out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        if gate is not None:
            out = out * mx.sigmoid(gate.reshape(out.shape))
        return self.o_proj(out)


class DynamicConvolution(nn.Module):
    """DFlash 2: convolutions along the block before and after a part of a layer.

    With ``d = kernel_projection(u)``, side j of entry i is
    ``sum_t (base_kernel[j, t] + d[i, j, t]) z[i - t]``. Entries before the block are zeros.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        hidden, taps = config.hidden_size, config.conv_taps
        self.groups = config.conv_groups
        self.base_kernel = mx.zeros((2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)

    def __call__(self, u: mx.array, part: Callable[[mx.array], mx.array]) -> mx.array:
        """Apply a part of a layer between the convolutions, shape (M, B, H) to (M, B, H)."""
        dynamic = self.kernel_projection(u).reshape(*u.shape[:2], 2, -1, self.groups, 1)
        z = part(self._convolve(u, dynamic[:, :, 0], 0))
        return self._convolve(z, dynamic[:, :, 1], 1)

    def _convolve(self, z: mx.array, dynamic: mx.array, side: int) -> mx.array:
        base, size = self.base_kernel[side].astype(z.dtype), z.shape[1]
        taps = len(base)
        rows = mx.pad(z, [(0, 0), (taps - 1, 0), (0, 0)])
        starts = range(taps - 1, -1, -1)
        earlier = mx.stack([rows[:, start : start + size] for start in starts], axis=2)
        kernel = base.reshape(taps, self.groups, -1) + dynamic
        return mx.sum(kernel * earlier.reshape(*kernel.shape), axis=2).reshape(z.shape)


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig, index: int):
        super().__init__()

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        self.self_attn = BlockAttention(config, index)
        activate = geglu if config.layer_type == "gemma4" else swiglu
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, activate)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.is_sandwich = config.layer_type == "gemma4"
        if self.is_sandwich:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
            self.layer_scalar = mx.ones((1,))
        if config.conv_taps:
            self.attention_conv = DynamicConvolution(config)
            self.mlp_conv = DynamicConvolution(config)

    def __call__(self, x: mx.array, around: Surroundings) -> mx.array:
        """Process blocks, shape (M, B, H) to (M, B, H)."""
        u = self.input_layernorm(x)
        attended = self._convolved("attention_conv", u, lambda u: self.self_attn(u, around))
        if self.is_sandwich:
            x = x + self.post_attention_layernorm(attended)
            y = self.mlp(self.pre_feedforward_layernorm(x))
            return (x + self.post_feedforward_layernorm(y)) * self.layer_scalar
        x = x + attended
        return x + self._convolved("mlp_conv", self.post_attention_layernorm(x), self.mlp)

    def _convolved(self, name: str, u: mx.array, part: Callable[[mx.array], mx.array]) -> mx.array:
        """Apply a part between the convolutions of that name, if any."""
        return self[name](u, part) if name in self else part(u)


class Selector(nn.Module):
    """The candidate selector of DFlash 2: ``feature = predecessor[p] * hidden_projection(h)``."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.successor_codebook = mx.zeros((config.head_rows, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)

    def feature(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        return self.predecessor_codebook[previous] * self.hidden_projection(hidden), None

    def scores(self, feature: mx.array, rows: mx.array | None) -> mx.array:
        table = self.successor_codebook
        return feature @ table.T if rows is None else _scores(feature, table[rows])


class MarkovHead(nn.Module):
    """The Markov head of DSpark.

    With ``e = w1[p]``, the feature is ``e``, ``sigmoid(gate_proj([h, e])) * e``, or the output of a
    recurrent cell: ``[g, c, o] = joint_proj([s, e, h])``, feature ``tanh(o)``, next state
    ``sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``, which begins with zeros.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.kind, rank = config.link, config.rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.head_rows, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "recurrent":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def feature(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        e = self.markov_w1(previous)
        if self.kind == "vanilla":
            return e, None
        h = mx.broadcast_to(hidden, (e.shape[0], hidden.shape[-1])).astype(e.dtype)
        if self.kind == "gated":
            return mx.sigmoid(self.gate_proj(mx.concatenate([h, e], axis=-1))) * e, None
        state = mx.zeros_like(e) if state is None else state
        joint = self.joint_proj(mx.concatenate([state, e, h], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)

    def scores(self, feature: mx.array, rows: mx.array | None) -> mx.array:
        if rows is None:
            return self.markov_w2(feature)
        table = self.markov_w2
        weight = table.weight[rows]
        if "scales" in table:
            weight = mx.dequantize(
                weight, table.scales[rows], table.biases[rows], table.group_size, table.bits
            )
        return _scores(feature, weight)


def _scores(feature: mx.array, weight: mx.array) -> mx.array:
    """Multiply features, (W, r), with rows of a table, (1, K, r) or (W, K, r), to (W, K)."""
    return (weight @ feature[..., None]).squeeze(-1)

"""Published equations of drafting networks in torch, as oracles of what they compute and learn.

Every position and level is computed by itself, without a cache: the text up to the root, and then
each draft of the level before appended to it, through causal layers. Axes: n tokens, H hidden size,
V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


class Frozen(NamedTuple):
    """The target's embedding and head, shape (V, H), and final norm; ``eps`` is that of heads."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    norm_eps: float
    eps: float


class Layer(NamedTuple):
    """Attention: query heads, heads of keys and values, and the base of the rotary embedding."""

    heads: int
    groups: int
    theta: float


Weights = Mapping[str, Tensor]
# From the states of a text up to the root's, the tokens after each of them, and the drafts, to the
# logits after the root and each draft but the last.
Head = Callable[[Tensor, Sequence[int], Sequence[int]], list[Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def project(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer, with a bias where it has one."""
    return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attend(weights: Weights, name: str, x: Tensor, layer: Layer, eps: float) -> Tensor:
    """Causal attention over rows, shape (n, width), the first one at position 0."""
    count = x.shape[0]

    def heads(part: str, number: int) -> Tensor:
        rows = project(weights, f"{name}.{part}_proj", x).reshape(count, number, -1)
        if f"{name}.{part}_norm.weight" in weights:
            rows = rms_norm(rows, weights[f"{name}.{part}_norm.weight"], eps)
        return rows.transpose(0, 1)

    queries, keys = rotate(heads("q", layer.heads), layer), rotate(heads("k", layer.groups), layer)
    values, shared = heads("v", layer.groups), layer.heads // layer.groups
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
    unseen = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values
    return project(weights, f"{name}.o_proj", mixed.transpose(0, 1).reshape(count, -1))


def rotate(x: Tensor, layer: Layer) -> Tensor:
    """Rotary embedding of halves, shape (heads, n, D)."""
    half = x.shape[-1] // 2
    frequencies = layer.theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply the MLP of Llama."""
    inner = silu(project(weights, f"{name}.gate_proj", x)) * project(weights, f"{name}.up_proj", x)
    return project(weights, f"{name}.down_proj", inner)


def decode(
    weights: Weights, name: str, residual: Tensor, entering: Tensor, layer: Layer, eps: float
) -> Tensor:
    """Apply Llama's decoder layer to rows that are normalised already."""
    h = residual + attend(weights, f"{name}.self_attn", entering, layer, eps)
    after = rms_norm(h, weights[f"{name}.post_attention_layernorm.weight"], eps)
    return h + mlp(weights, f"{name}.mlp", after)


class Recurrent(NamedTuple):
    """Equations of the recurrent drafter (arXiv 2403.09919, Apple's ``modeling_drafter.py``).

        s_t = f(W e_t + U s_{t-1} + b), or s_t = e_t + s_{t-1};  s_0 = 0
        x = [h, s_t]; x = P x + p if widths differ; x = x + silu(L_i x + l_i); logits = V x

    with f = silu and Apple's names. TensorRT-LLM: f = identity and s_1 = W e_1, without U's bias.
    """

    weights: Weights
    is_tensorrt: bool = False

    def advance(self, state: Tensor | None, embedding: Tensor) -> Tensor:
        """Return the next state, shape (..., H); ``state`` is None at the first step."""
        previous = torch.zeros_like(embedding) if state is None else state
        if "rnn_w.weight" not in self.weights:
            return embedding + previous
        update = project(self.weights, "rnn_w", embedding)
        if self.is_tensorrt:
            return update if state is None else update + project(self.weights, "rnn_u", previous)
        return silu(update + project(self.weights, "rnn_u", previous))

    def logits(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return logits, shape (..., V)."""
        x = torch.cat([hidden.expand_as(state), state], dim=-1)
        if "input_proj.weight" in self.weights:
            x = project(self.weights, "input_proj", x)
        return residual_blocks(self.weights, "lm_head", x)


def residual_blocks(weights: Weights, name: str, x: Tensor) -> Tensor:
    """``x = x + silu(L_i x + l_i)`` for each block i, and then the logits ``V x``."""
    number = 0
    while f"{name}.{number}.linear.weight" in weights:
        x = x + silu(project(weights, f"{name}.{number}.linear", x))
        number += 1
    return project(weights, f"{name}.{number}", x)


def recurrent(weights: Weights, frozen: Frozen) -> Head:
    """Build the recurrent drafter."""
    drafter = Recurrent(weights)

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        state, found = None, []
        for token in (following[-1], *drafts):
            state = drafter.advance(state, frozen.embedding[token])
            found.append(drafter.logits(states[-1], state))
        return found

    return logits


def medusa(weights: Weights) -> Head:
    """Build Medusa heads (arXiv 2401.10774), one for each level."""

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        levels = range(len(drafts) + 1)
        return [residual_blocks(weights, f"heads.{level}", states[-1]) for level in levels]

    return logits


def autoregressive(
    process: Callable[[Tensor, Tensor], Tensor],
    fuse: Callable[[Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    frozen: Frozen,
    feed_back: Callable[[Tensor], Tensor],
) -> Head:
    """Build a network that reads its own outputs, by ``process`` of features and tokens."""

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        features, tokens = fuse(states), list(following)
        found = []
        for draft in (*drafts, None):
            output = process(features, frozen.embedding[tokens])[-1]
            found.append(score(output))
            if draft is not None:
                features, tokens = torch.cat([features, feed_back(output)[None]]), [*tokens, draft]
        return found

    return logits


def eagle(
    weights: Weights,
    frozen: Frozen,
    layer: Layer,
    version: int = 3,
    prefix: str = "layers.0",
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> Head:
    """Build an EAGLE head.

    Written from SafeAILab/EAGLE (``cnets1.py``, ``cnets.py``) and vllm-project/speculators
    (``models/eagle3/core.py``):

        EAGLE-1   g = fc([E x, f]);                  x = g
        EAGLE-3   g = fc([s_a, s_b, s_c]) or what was fed back;  x = [norm_e(E x), norm_g(g)]
        both      h = r + attention(x);  h = h + mlp(norm(h));  logits = head(norm(h)), EAGLE-1's
                  without a norm; r is g, or norm_g(g) with norm_before_residual

    with input_norm on all states, fc_norm on each, and norm_output on what is fed back.
    """

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], frozen.eps)

    def fuse(states: Tensor) -> Tensor:
        if "input_norm.weight" in weights:
            states = norm("input_norm", states)
        if "fc_norm.0.weight" in weights:
            parts = states.chunk(3, -1)
            states = torch.cat([norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return project(weights, "fc", states) if version == 3 and "fc.weight" in weights else states

    def process(features: Tensor, embedded: Tensor) -> Tensor:
        if version == 1:
            entering = residual = project(weights, "fc", torch.cat([embedded, features], -1))
        else:
            normed = norm(f"{prefix}.hidden_norm", features)
            residual = normed if norm_before_residual else features
            entering = torch.cat([norm(f"{prefix}.input_layernorm", embedded), normed], -1)
        h, number = decode(weights, prefix, residual, entering, layer, frozen.eps), 1
        while f"layers.{number}.input_layernorm.weight" in weights:
            name = f"layers.{number}"
            entering = norm(f"{name}.input_layernorm", h)
            h, number = decode(weights, name, h, entering, layer, frozen.eps), number + 1
        return h

    def score(output: Tensor) -> Tensor:
        if version == 1:
            return frozen.head @ output
        return project(weights, "lm_head", norm("norm", output))

    def feed_back(output: Tensor) -> Tensor:
        return norm("norm", output) if norm_output else output

    return autoregressive(process, fuse, score, frozen, feed_back)


def mtp(weights: Weights, frozen: Frozen, layer: Layer) -> Head:
    """Build MiMo's MTP module: the state before the embedding, and normalised outputs fed back."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], frozen.eps)

    def process(features: Tensor, embedded: Tensor) -> Tensor:
        pair = [norm("hidden_norm", features), norm("embedding_norm", embedded)]
        x = project(weights, "join", torch.cat(pair, -1))
        entering = norm("block.input_layernorm", x)
        return decode(weights, "block", x, entering, layer, frozen.eps)

    def normalise(output: Tensor) -> Tensor:
        return norm("norm", output)

    def score(output: Tensor) -> Tensor:
        return frozen.head @ normalise(output)

    return autoregressive(process, lambda states: states, score, frozen, normalise)


def specformer(weights: Weights, frozen: Frozen, layer: Layer, num_states: int) -> Head:
    """Build a SpecFormer: all slots from the context of the root."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], frozen.eps)

    def attended(name: str, x: Tensor) -> Tensor:
        entering = norm(f"{name}_input_norm", x)
        return x + attend(weights, f"{name}_att", entering, layer, frozen.eps)

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        parts = states.chunk(num_states, -1)
        joined = torch.cat([norm(f"norms.{i}", part) for i, part in enumerate(parts)], -1)
        h = attended("decoder", project(weights, "down_samp", joined))
        x = project(weights, "positional", norm("positional_input_norm", h[-1]))
        x = attended("encoder", x.reshape(-1, h.shape[-1])[: len(drafts) + 1])
        after = norm("encoder_ffn_input_norm", x)
        gate = project(weights, "encoder_ffn.gate_proj", after)
        up = project(weights, "encoder_ffn.up_proj", after)
        x = x + project(weights, "encoder_ffn.down_proj", gate * silu(up))
        return list(rms_norm(x, frozen.norm, frozen.norm_eps) @ frozen.head.T)

    return logits

"""Heads and their training loss in torch and float64, written from their equations.

Every position and level is computed by itself: the text up to the root, and then each draft of the
level before appended to it, through causal layers. Axes: n tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


class Frozen(NamedTuple):
    """Outputs of the target.

    Attributes:
        embedding: Input embedding, shape (V, H).
        head: Output matrix, shape (V, H).
        norm: Weight of the final norm, shape (H,).
        norm_eps: Epsilon of that norm.
        eps: Epsilon of the norms of heads.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor
    norm_eps: float
    eps: float


class Layer(NamedTuple):
    """Sizes of attention.

    Attributes:
        heads: Query heads.
        groups: Heads of keys and values.
        theta: Base of the rotary embedding.
    """

    heads: int
    groups: int
    theta: float


Weights = dict[str, Tensor]
# From the states of a text up to the root's, the tokens after each of them, and the drafts, to the
# logits after the root and each draft but the last.
Head = Callable[[Tensor, Sequence[int], Sequence[int]], list[Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def project(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer, with a bias where it has one."""
    return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attend(weights: Weights, name: str, x: Tensor, layer: Layer) -> Tensor:
    """Causal attention over rows, shape (n, width), the first one at position 0."""
    count = x.shape[0]

    def heads(part: str, number: int) -> Tensor:
        return project(weights, f"{name}.{part}", x).reshape(count, number, -1).transpose(0, 1)

    queries, keys = (
        rotate(heads("q_proj", layer.heads), layer.theta),
        rotate(heads("k_proj", layer.groups), layer.theta),
    )
    values, shared = heads("v_proj", layer.groups), layer.heads // layer.groups
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
    unseen = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values
    return project(weights, f"{name}.o_proj", mixed.transpose(0, 1).reshape(count, -1))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of halves, shape (heads, n, D)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply the MLP of Llama."""
    inner = silu(project(weights, f"{name}.gate_proj", x)) * project(weights, f"{name}.up_proj", x)
    return project(weights, f"{name}.down_proj", inner)


def recurrent(weights: Weights, frozen: Frozen, num_layers: int) -> Head:
    """Build the recurrent drafter."""

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        hidden = states[-1]
        state = torch.zeros_like(hidden)
        found = []
        for token in (following[-1], *drafts):
            entering = weights["rnn_w.weight"] @ frozen.embedding[token]
            state = silu(entering + project(weights, "rnn_u", state))
            x = torch.cat([hidden, state])
            if "input_proj.weight" in weights:
                x = project(weights, "input_proj", x)
            for layer in range(num_layers):
                x = x + silu(project(weights, f"lm_head.{layer}.linear", x))
            found.append(project(weights, f"lm_head.{num_layers}", x))
        return found

    return logits


def medusa(weights: Weights, num_layers: int) -> Head:
    """Medusa heads, one for each level."""

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        found = []
        for head in range(len(drafts) + 1):
            x = states[-1]
            for layer in range(num_layers):
                x = x + silu(project(weights, f"heads.{head}.{layer}.linear", x))
            found.append(project(weights, f"heads.{head}.{num_layers}", x))
        return found

    return logits


def autoregressive(
    process: Callable[[Tensor, Tensor], Tensor],
    fuse: Callable[[Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    frozen: Frozen,
    feed_back: Callable[[Tensor], Tensor] = lambda output: output,
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


def eagle(weights: Weights, frozen: Frozen, layer: Layer) -> Head:
    """EAGLE-3."""

    def process(features: Tensor, embedded: Tensor) -> Tensor:
        name, eps = "layers.0", frozen.eps
        e = rms_norm(embedded, weights[f"{name}.input_layernorm.weight"], eps)
        g = rms_norm(features, weights[f"{name}.hidden_norm.weight"], eps)
        h = features + attend(weights, f"{name}.self_attn", torch.cat([e, g], -1), layer)
        after = rms_norm(h, weights[f"{name}.post_attention_layernorm.weight"], eps)
        return h + mlp(weights, f"{name}.mlp", after)

    def score(output: Tensor) -> Tensor:
        return project(weights, "lm_head", rms_norm(output, weights["norm.weight"], frozen.eps))

    return autoregressive(process, lambda states: project(weights, "fc", states), score, frozen)


def eagle_1(weights: Weights, frozen: Frozen, layer: Layer) -> Head:
    """EAGLE-1, whose layer has no norm before its attention."""

    def process(features: Tensor, embedded: Tensor) -> Tensor:
        name = "layers.0"
        x = project(weights, "fc", torch.cat([embedded, features], -1))
        h = x + attend(weights, f"{name}.self_attn", x, layer)
        after = rms_norm(h, weights[f"{name}.post_attention_layernorm.weight"], frozen.eps)
        return h + mlp(weights, f"{name}.mlp", after)

    return autoregressive(process, lambda states: states, lambda h: frozen.head @ h, frozen)


def mtp(weights: Weights, frozen: Frozen, layer: Layer) -> Head:
    """MiMo's MTP module: the state before the embedding, and normalised outputs fed back."""
    eps = frozen.eps

    def process(features: Tensor, embedded: Tensor) -> Tensor:
        pair = [
            rms_norm(features, weights["hidden_norm.weight"], eps),
            rms_norm(embedded, weights["embedding_norm.weight"], eps),
        ]
        x = project(weights, "join", torch.cat(pair, -1))
        before = rms_norm(x, weights["block.input_layernorm.weight"], eps)
        h = x + attend(weights, "block.self_attn", before, layer)
        after = rms_norm(h, weights["block.post_attention_layernorm.weight"], eps)
        return h + mlp(weights, "block.mlp", after)

    def normalise(output: Tensor) -> Tensor:
        return rms_norm(output, weights["norm.weight"], eps)

    return autoregressive(
        process,
        lambda states: states,
        lambda output: frozen.head @ normalise(output),
        frozen,
        normalise,
    )


def specformer(weights: Weights, frozen: Frozen, layer: Layer, num_states: int) -> Head:
    """Build a SpecFormer: all slots from the context of the root."""
    eps = frozen.eps

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], eps)

    def logits(states: Tensor, following: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        parts = states.chunk(num_states, -1)
        joined = torch.cat([norm(f"norms.{i}", part) for i, part in enumerate(parts)], -1)
        f = project(weights, "down_samp", joined)
        h = f + attend(weights, "decoder_att", norm("decoder_input_norm", f), layer)
        x = project(weights, "positional", norm("positional_input_norm", h[-1]))
        x = x.reshape(-1, f.shape[-1])[: len(drafts) + 1]
        x = x + attend(weights, "encoder_att", norm("encoder_input_norm", x), layer)
        after = norm("encoder_ffn_input_norm", x)
        gate = project(weights, "encoder_ffn.gate_proj", after)
        up = project(weights, "encoder_ffn.up_proj", after)
        x = x + project(weights, "encoder_ffn.down_proj", gate * silu(up))
        return list(rms_norm(x, frozen.norm, frozen.norm_eps) @ frozen.head.T)

    return logits


def loss(head: Head, batch: dict[str, Any], decay: float, floor: float) -> Tensor:
    """Compute the distilling loss, position by position and level by level.

    Args:
        head: The head.
        batch: Arrays of `TrainingBatch`, as tensors in float64 or integers.
        decay: Weight of each level relative to the one before.
        floor: Smoothing of the chance that the drafts before a level are accepted.
    """
    tokens, sequences = batch["tokens"].tolist(), batch["sequences"].tolist()
    counts, total = batch["weights"].sum(0), torch.zeros((), dtype=torch.float64)
    for row, text in enumerate(tokens):
        start = sequences.index(sequences[row])
        following = [one[0] for one in tokens[start : row + 1]]
        found = head(batch["states"][start : row + 1], following, text[1:-1])
        reached = 1.0
        for level, logits in enumerate(found):
            log_q = logits.log_softmax(-1)
            if not batch["weights"][row, level]:
                break  # the text is over
            weight = batch["weights"][row, level] / counts[level] * decay**level * reached
            total = total + weight * _divergence(log_q, batch, row, level)
            reached *= (1 - floor) * float(log_q[text[level + 1]].detach().exp()) + floor
    return total


def _divergence(log_q: Tensor, batch: dict[str, Any], row: int, level: int) -> Tensor:
    """Of the kept tokens, and all others as one."""
    ids, log_p = batch["top_ids"][row, level], batch["top_log_probs"][row, level]
    tail = batch["tail"][row, level]
    others = torch.ones(log_q.shape[-1], dtype=torch.bool)
    others[ids] = False
    kept = (log_p.exp() * (log_p - log_q[ids])).sum()
    return kept + torch.xlogy(tail, tail) - tail * log_q[others].exp().sum().log()

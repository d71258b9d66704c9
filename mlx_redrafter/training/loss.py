"""What a drafter is carried_over: the target's distributions along its own unrolled states.

Axes: B positions, S = L - 1 unroll steps, H hidden size, V rows of the head, k kept tokens.

At position t the drafter sees the hidden state h_t and the tokens x_{t+1} (the root) to x_{t+1+i},
and predicts x_{t+2+i}: step i of S. The target's own distribution of that token is P_{t+1+i}, which
one pass over the text gives for all t and i. Taught this on text that the target wrote, the drafter
minimises the paper's Eq. 2 with its inner expectation taken exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.training.options import DISTILLING, LossOptions

# The log-probability of what is impossible; its exponential is zero in float32.
IMPOSSIBLE = -1e4
# Least probability outside the kept tokens that float32 can tell from none.
LEAST_TAIL = 1e-7
# Less probable events count as this probable where probabilities are divided by one another.
LEAST_RATIO_LOG_PROB = -30.0
# Of agreeing by chance: bounds the gradient where the drafter is wrong.
LEAST_AGREEMENT = 1e-4


class Batch(NamedTuple):
    """B positions with what the drafter sees and what it should say.

    Attributes:
        hidden: The target's hidden states, shape (B, H).
        tokens: Root and drafts, int32, shape (B, S + 1).
        labels: Rows of the head of the tokens after the root, int32, shape (B, S); -1 where the
            head has none.
        weights: 1 where a step counts, 0 elsewhere, float32, shape (B, S).
        top_ids: Rows of the head of the target's most probable tokens, int32, shape (B, S, k).
        top_log_probs: Their natural log-probabilities, float32, shape (B, S, k).
        tail: The probability of all other tokens, float32, shape (B, S).
    """

    hidden: mx.array
    tokens: mx.array
    labels: mx.array
    weights: mx.array
    top_ids: mx.array
    top_log_probs: mx.array
    tail: mx.array

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the positions."""
        return Batch(*(array[start:stop] for array in self))


def unrolled_loss(
    drafter: Drafter, embed: Embed, batch: Batch, counts: mx.array, options: LossOptions
) -> mx.array:
    """Loss of a batch, or of a part of it, in nats.

        loss = sum_i w_i (sum_t rho_{t,i} l_{t,i}) / counts_i

    "soft": l is the Kullback-Leibler divergence of the drafter from the target, w_i =
    position_decay^i, and rho_{t,i} the chance that the drafts before step i are accepted (as in
    D-PACE), through which no gradient flows. "coupled": l is the negative logarithm of `agreement`,
    w and rho as before. "apple" and "rollouts": l is the cross-entropy on the next token of
    ``batch.tokens``, w and rho are 1.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        batch: Positions, all or some.
        counts: Steps that count in the whole batch, float32, shape (S,): parts of a batch add up.
        options: Which loss.

    Returns:
        A float32 scalar.
    """
    logits = unrolled_logits(drafter, embed, batch)
    if options.recipe in DISTILLING:
        teacher = (batch.top_ids, batch.top_log_probs, batch.tail)
        if options.recipe == "soft":
            losses = divergence(logits, *teacher)
        else:
            losses = -mx.log(agreement(logits, *teacher) + LEAST_AGREEMENT)
        decay = options.position_decay ** mx.arange(losses.shape[1])
        weights = batch.weights * decay * confidence(logits, batch.labels, options.confidence_floor)
    else:
        losses = cross_entropy(logits, batch.labels)
        weights = batch.weights * (batch.labels >= 0)  # what cannot be drafted is not carried_over
    return mx.sum(mx.sum(weights * losses, axis=0) / mx.maximum(counts, 1.0))


def unrolled_logits(drafter: Drafter, embed: Embed, batch: Batch) -> mx.array:
    """The drafter's logits after the root and after each draft, float32, shape (B, S, V)."""
    num_steps = batch.tokens.shape[1] - 1
    entered = drafter.project_input(embed(batch.tokens[:, :num_steps]))  # (B, S, H)
    states = [drafter.start(entered[:, 0])]
    for step in range(1, num_steps):
        states.append(drafter.advance(states[-1], entered[:, step]))
    hidden = batch.hidden[:, None].astype(drafter.dtype)
    return drafter.logits(hidden, mx.stack(states, axis=1)).astype(mx.float32)


def divergence(
    logits: mx.array, top_ids: mx.array, top_log_probs: mx.array, tail: mx.array
) -> mx.array:
    """Kullback-Leibler divergence over k + 1 events: each kept token, and any other token.

        KL = sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail)

    Renormalising the kept tokens instead would teach the drafter that the others never come.

    Args:
        logits: The drafter's, float32, shape (..., V).
        top_ids: Distinct rows of the head, shape (..., k); junk where the probability is 0.
        top_log_probs: The target's, natural logarithm, shape (..., k).
        tail: The target's probability of all other tokens, shape (...).

    Returns:
        Nats, shape (...).
    """
    log_q, log_q_tail = _log_probs_of_events(logits, top_ids, top_log_probs)
    kept = mx.sum(mx.exp(top_log_probs) * (top_log_probs - log_q), axis=-1)
    return kept + tail * (mx.log(mx.maximum(tail, LEAST_TAIL)) - log_q_tail)


def agreement(
    logits: mx.array, top_ids: mx.array, top_log_probs: mx.array, tail: mx.array
) -> mx.array:
    """The chance that drafter and target, sampling with the same noise, choose the same token.

    With Gumbel noise G both choose i where ``G_i - G_j`` is at least ``log(p_j / p_i)`` and
    ``log(q_j / q_i)`` for every j, which has the chance ``1 / sum_j max(p_j / p_i, q_j / q_i)``
    (the coupling of arXiv 2408.07978). Over the k + 1 events of `divergence`, of which the last,
    any other token, is not taken for the same one. With the events in the order of ``q / p`` the
    sum over j is that of p up to i, over p_i, and that of q beyond i, over q_i.

    Args:
        logits: The drafter's, float32, shape (..., V).
        top_ids: As in `divergence`, shape (..., k).
        top_log_probs: As in `divergence`, shape (..., k).
        tail: As in `divergence`, shape (...).

    Returns:
        From 0 to 1, shape (...).
    """
    log_q, log_q_tail = _log_probs_of_events(logits, top_ids, top_log_probs)
    log_q = mx.where(top_log_probs > IMPOSSIBLE, log_q, LEAST_RATIO_LOG_PROB)
    log_tail = mx.log(mx.maximum(tail, LEAST_TAIL))
    p = mx.concatenate([top_log_probs, log_tail[..., None]], axis=-1)
    q = mx.concatenate([log_q, log_q_tail[..., None]], axis=-1)
    p, q = mx.maximum(p, LEAST_RATIO_LOG_PROB), mx.maximum(q, LEAST_RATIO_LOG_PROB)
    order = mx.argsort(mx.stop_gradient(q - p), axis=-1)
    p = mx.exp(mx.take_along_axis(p, order, axis=-1))
    q = mx.exp(mx.take_along_axis(q, order, axis=-1))
    up_to = mx.cumsum(p, axis=-1)
    beyond = mx.cumsum(q, axis=-1, reverse=True, inclusive=False)
    is_token = order < top_ids.shape[-1]
    return mx.sum(is_token / (up_to / p + beyond / q), axis=-1)


def _log_probs_of_events(
    logits: mx.array, top_ids: mx.array, top_log_probs: mx.array
) -> tuple[mx.array, mx.array]:
    """The drafter's log-probabilities of the kept tokens, (..., k), and of any other, (...)."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    log_q = mx.take_along_axis(logits, top_ids, axis=-1) - total
    # log(1 - sum q) without the cancellation, and finite where the kept tokens are everything.
    kept = mx.logsumexp(mx.where(top_log_probs > IMPOSSIBLE, log_q, -mx.inf), axis=-1)
    return log_q, mx.log(-mx.expm1(mx.minimum(kept, -LEAST_TAIL)))


def cross_entropy(logits: mx.array, labels: mx.array) -> mx.array:
    """``-log q(label)`` in nats; logits of shape (..., V), rows of shape (...), junk for -1."""
    rows = mx.maximum(labels, 0)
    chosen = mx.take_along_axis(logits, rows[..., None], axis=-1)[..., 0]
    return mx.logsumexp(logits, axis=-1) - chosen


def confidence(logits: mx.array, labels: mx.array, floor: float) -> mx.array:
    """The chance that the drafts before each step are accepted, smoothed; no gradient.

        rho_i = prod_{j < i} ((1 - floor) q_j(x_{t+2+j}) + floor)

    Args:
        logits: The drafter's, shape (B, S, V).
        labels: Rows of the tokens that follow, shape (B, S); -1 is never accepted.
        floor: From 0 to 1; 1 gives ones.

    Returns:
        float32, shape (B, S).
    """
    if floor == 1:
        return mx.ones(labels.shape)
    probs = mx.stop_gradient(mx.exp(-cross_entropy(logits, labels))) * (labels >= 0)
    factors = (1 - floor) * probs + floor
    before = mx.concatenate([mx.ones_like(factors[:, :1]), factors[:, :-1]], axis=1)
    return mx.cumprod(before, axis=1)

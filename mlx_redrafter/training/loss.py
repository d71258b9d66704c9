"""The training losses: distillation of the target along the drafter's unrolled states.

Axes: N positions, B of them that draft, S = L - 1 unroll steps, C layers of the target, H hidden
size, V rows of the head, k kept tokens.

At position t a drafter reads the hidden state h_t and the tokens x_{t+1} (the root) to x_{t+1+i},
or only the root of these, and predicts x_{t+2+i}: step i of S. The target's distribution of that
token is P_{t+1+i}, which one pass over the text gives for all t and i. Trained on these
distributions along self-generated text, the drafter minimises the paper's Eq. 2 with an exact inner
expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_redrafter.training_options import Recipe

# Log-probability of impossible tokens, in nats; its exponential is zero in float32.
IMPOSSIBLE = -1e4
# Minimum probability outside the kept tokens; float32 cannot tell a smaller one from zero.
LEAST_TAIL = 1e-7
# Lower bound of the log-probabilities in the ratios of `agreement`, in nats.
LEAST_RATIO_LOG_PROB = -30.0
# Probability added to the agreement before the logarithm; bounds the gradient of wrong drafts.
LEAST_AGREEMENT = 1e-4
# Weight of each unroll step relative to the one before.
POSITION_DECAY = 0.8
# Smoothing a of the probability that the drafts before a step are accepted: each acceptance
# probability q becomes (1 - a) q + a.
CONFIDENCE_FLOOR = 0.5
# Share of the cross-entropy on the text in the objective of DSpark, as published.
TEXT_SHARE = 0.1


class Distribution(NamedTuple):
    """Distribution of the next token under a drafter.

    ``logits`` are float32, shape (..., V); ``total`` is the logarithm of the sum of their
    exponentials, shape (...).
    """

    logits: mx.array
    total: mx.array

    @classmethod
    def of(cls, logits: mx.array) -> Distribution:
        """Normalise logits, float32, shape (..., V)."""
        # The decorator erases the type of `_log_total`.
        total, _ = cast(tuple[mx.array, mx.array], _log_total(logits))
        return cls(logits, total)

    def at(self, rows: mx.array) -> mx.array:
        """Return natural log-probabilities of rows of the head, integer, same shape (..., k)."""
        return mx.take_along_axis(self.logits, rows, axis=-1) - self.total[..., None]


# Exponentials are most of the cost of a step on a CPU. MLX's own logsumexp computes them a second
# time for the gradient; this one keeps the probabilities, which are its gradient.
@mx.custom_function
def _log_total(logits: mx.array) -> tuple[mx.array, mx.array]:
    probs = mx.softmax(logits, axis=-1)
    return mx.max(logits, axis=-1) - mx.log(mx.max(probs, axis=-1)), probs


@_log_total.vjp
def _log_total_gradient(
    logits: mx.array, cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> mx.array:
    return cotangents[0][..., None] * outputs[1]


class TrainingBatch(NamedTuple):
    """The drafter's inputs and the target's outputs at N positions.

    Attributes:
        states: Last hidden states of the target, shape (N, H), or the inputs of the C layers that
            the drafter reads, shape (N, C * H).
        sequences: Number of the sequence of each position, int32, shape (N,).
        following: Token after each position, int32, shape (N,).
        anchors: Indices of the positions that draft in their example, int32, shape (B,).
        tokens: Root and drafts, int32, shape (B, S + 1).
        labels: Rows of the head for the tokens after the root, -1 without a row, int32, shape
            (B, S).
        weights: 1 for steps that count, 0 for the others, float32, shape (B, S).
        top_ids: Rows of the head for the target's most probable tokens, int32, shape (B, S, k).
        top_log_probs: Their natural log-probabilities, float32, shape (B, S, k).
        tail: Probability of all other tokens, float32, shape (B, S).
    """

    states: mx.array
    sequences: mx.array
    following: mx.array
    anchors: mx.array
    tokens: mx.array
    labels: mx.array
    weights: mx.array
    top_ids: mx.array
    top_log_probs: mx.array
    tail: mx.array

    def part(self, number: int, count: int) -> TrainingBatch:
        """Select one of ``count`` parts of almost equal size."""
        parts = [one[len(one) * number // count : len(one) * (number + 1) // count] for one in self]
        return TrainingBatch(*parts)


def draft_loss(
    logits: mx.array,
    batch: TrainingBatch,
    counts: mx.array,
    recipe: Recipe,
    confidences: mx.array | None = None,
) -> mx.array:
    """Compute the loss of a batch, or of a part of a batch, in nats.

        loss = sum_i w_i (sum_t rho_{t,i} l_{t,i}) / counts_i

    "soft": l is the Kullback-Leibler divergence of the drafter from the target, w_i =
    `POSITION_DECAY`^i, and rho_{t,i} the chance that the drafts before step i are accepted (as in
    D-PACE), through which no gradient flows. "coupled": l is the negative logarithm of `agreement`,
    w and rho as before. "overlap": l is `TEXT_SHARE` of the cross-entropy on the text, and for the
    rest the sum of |p - q|, w as before, rho 1 (DeepSpec's trainer of DSpark). "apple": l is the
    cross-entropy on the next token of ``batch.tokens``, w and rho are 1.

    Args:
        logits: The drafter's logits after the root and each draft but the last, float32, shape
            (B, S, V).
        batch: Some or all positions of a batch.
        counts: Number of positions of the whole batch whose step i counts, float32, shape (S,).
        recipe: Training objective.
        confidences: Natural log-probabilities of acceptance by the drafter's own estimate, float32,
            shape (B, S), or None. Their cross-entropy with `overlap` joins l, as in DSpark.
    """
    drafter = Distribution.of(logits)
    teacher = (batch.top_ids, batch.top_log_probs, batch.tail)
    # Tokens without a row cannot be drafted.
    on_text = (batch.labels >= 0) * cross_entropy(drafter, batch.labels)
    weights = batch.weights * POSITION_DECAY ** mx.arange(logits.shape[1])
    if recipe == "apple":
        losses, weights = on_text, batch.weights
    elif recipe == "overlap":
        distance = 2 * (1 - overlap(drafter, *teacher))
        losses = TEXT_SHARE * on_text + (1 - TEXT_SHARE) * distance
    else:
        weights = weights * confidence(drafter, batch.labels)
        if recipe == "soft":
            losses = divergence(drafter, *teacher)
        else:
            losses = -mx.log(agreement(drafter, *teacher) + LEAST_AGREEMENT)
    if confidences is not None:
        accepted = mx.stop_gradient(overlap(drafter, *teacher))
        rejected = mx.log(-mx.expm1(mx.minimum(confidences, -LEAST_TAIL)))
        losses = losses - accepted * confidences - (1 - accepted) * rejected
    return mx.sum(mx.sum(weights * losses, axis=0) / mx.maximum(counts, 1.0))


def divergence(
    drafter: Distribution, top_ids: mx.array, top_log_probs: mx.array, tail: mx.array
) -> mx.array:
    """Compute the Kullback-Leibler divergence over k + 1 events: each kept token, and any other.

        KL = sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail)

    Renormalising the kept tokens instead would train the drafter to rule the others out. The result
    is in nats, shape (...). ``top_ids`` are rows of the head for the kept tokens, (..., k),
    distinct, and arbitrary for probability 0. The target's natural log-probabilities of these are
    ``top_log_probs``, (..., k), and ``tail`` is its probability of all others, (...).
    """
    log_q, log_q_tail = _log_probs_of_events(drafter, top_ids, top_log_probs)
    kept = mx.sum(mx.exp(top_log_probs) * (top_log_probs - log_q), axis=-1)
    return kept + tail * (mx.log(mx.maximum(tail, LEAST_TAIL)) - log_q_tail)


def overlap(
    drafter: Distribution, top_ids: mx.array, top_log_probs: mx.array, tail: mx.array
) -> mx.array:
    """Compute the sum of min(p, q) over the events of `divergence`, shape (...).

    It is the probability that rejection sampling accepts a draft, 1 minus the total variation.
    """
    log_q, log_q_tail = _log_probs_of_events(drafter, top_ids, top_log_probs)
    kept = mx.sum(mx.exp(mx.minimum(top_log_probs, log_q)), axis=-1)
    return kept + mx.minimum(tail, mx.exp(log_q_tail))


def agreement(
    drafter: Distribution, top_ids: mx.array, top_log_probs: mx.array, tail: mx.array
) -> mx.array:
    """Compute the probability that drafter and target sample the same token with the same noise.

    With Gumbel noise G both choose i if ``G_i - G_j`` is at least ``log(p_j / p_i)`` and
    ``log(q_j / q_i)`` for every j. The probability of that is
    ``1 / sum_j max(p_j / p_i, q_j / q_i)`` (Gumbel coupling, arXiv 2408.07978).

    The arguments and events are those of `divergence`; its last event never counts as agreement.
    With the events sorted by ``q / p``, the sum over j is the sum of p up to i, divided by p_i,
    plus the sum of q beyond i, divided by q_i.
    """
    log_q, log_q_tail = _log_probs_of_events(drafter, top_ids, top_log_probs)
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
    drafter: Distribution, top_ids: mx.array, top_log_probs: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute the drafter's log-probabilities of kept tokens (..., k) and of any other (...)."""
    log_q = drafter.at(top_ids)
    # log(1 - sum q) without cancellation, finite even if the kept tokens are all tokens or none.
    kept = mx.logsumexp(mx.where(top_log_probs > IMPOSSIBLE, log_q, IMPOSSIBLE), axis=-1)
    return log_q, mx.log(-mx.expm1(mx.minimum(kept, -LEAST_TAIL)))


def cross_entropy(drafter: Distribution, labels: mx.array) -> mx.array:
    """Compute ``-log q(label)`` in nats, shape (...); the result for labels of -1 is arbitrary."""
    return -drafter.at(mx.maximum(labels, 0)[..., None])[..., 0]


def confidence(drafter: Distribution, labels: mx.array) -> mx.array:
    """Estimate the probability, (B, S), that the drafts before a step are accepted; no gradient.

        rho_i = prod_{j < i} ((1 - a) q_j(x_{t+2+j}) + a),   a = `CONFIDENCE_FLOOR`

    ``labels`` are rows of the head for the tokens that follow, -1 for those never accepted, (B, S).
    """
    probs = mx.stop_gradient(mx.exp(-cross_entropy(drafter, labels))) * (labels >= 0)
    factors = (1 - CONFIDENCE_FLOOR) * probs + CONFIDENCE_FLOOR
    before = mx.concatenate([mx.ones_like(factors[:, :1]), factors[:, :-1]], axis=1)
    return mx.cumprod(before, axis=1)

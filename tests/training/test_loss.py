"""The loss and its gradient against literal sums in torch, and at its edges."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.training import loss
from mlx_redrafter.training.loss import IMPOSSIBLE, Distribution, TrainingBatch, draft_loss
from mlx_redrafter.training_options import RECIPES, Recipe
from tests.training.pieces import kept_of

H, V, K, S, B = 4, 11, 3, 3, 5


def divergence(logits: mx.array, *teacher: mx.array) -> mx.array:
    return loss.divergence(Distribution.of(logits), *teacher)


def agreement(logits: mx.array, *teacher: mx.array) -> mx.array:
    return loss.agreement(Distribution.of(logits), *teacher)


def _batch() -> TrainingBatch:
    rng = np.random.default_rng(5)
    teacher = rng.normal(size=(B, S, V)) * 2
    teacher -= np.log(np.exp(teacher).sum(-1, keepdims=True))
    weights = (rng.random((B, S)) < 0.7).astype(np.float32)
    weights[0] = 1
    hidden = rng.normal(size=(B, H)).astype(np.float32)
    tokens = rng.integers(0, V, (B, S + 1)).astype(np.int32)
    return TrainingBatch(
        states=mx.array(hidden),
        sequences=mx.zeros(B, dtype=mx.int32),
        following=mx.array([]),
        anchors=mx.arange(B),
        tokens=mx.array(tokens),
        labels=mx.array(tokens[:, 1:]),
        weights=mx.array(weights),
        **kept_of(teacher, K),
    )


class Case:
    """Logits, a batch and a recipe, with the reference's view of them."""

    def __init__(self, recipe: Recipe = "soft"):
        self.recipe, self.batch = recipe, _batch()
        self.logits = mx.random.normal((B, S, V), key=mx.random.key(5)) * 2
        self.counts = mx.sum(self.batch.weights, axis=0)

    def loss(self, logits: mx.array, batch: TrainingBatch | None = None) -> mx.array:
        return draft_loss(logits, batch or self.batch, self.counts, self.recipe)


def test_divergence_is_zero_for_the_teacher_itself_and_finite_at_the_edges():
    logits = mx.array([[2.0, 1.0, 0.0, -1.0]])
    log_probs = logits - mx.logsumexp(logits)
    ids = mx.array([[0, 1]])
    tail = mx.sum(mx.exp(log_probs[:, 2:]), axis=-1)
    same = divergence(logits, ids, log_probs[:, :2], tail)
    assert abs(same.item()) < 1e-6
    certain = mx.array([[60.0, -60.0, -60.0, -60.0]])
    assert np.isfinite(divergence(certain, ids, log_probs[:, :2], tail).item())
    everything = mx.array([[0, 1, 2, 3]])
    assert abs(divergence(logits, everything, log_probs, mx.array([0.0])).item()) < 1e-6
    # A token outside the draft vocabulary, or one that the target's own filters forbid.
    impossible = mx.array([[0.0, IMPOSSIBLE]])
    assert divergence(certain, ids, impossible, mx.array([0.0])).item() == pytest.approx(
        0, abs=1e-6
    )


def test_agreement_is_how_often_both_sample_the_same():
    rng = np.random.default_rng(3)
    teacher, logits = rng.normal(size=(2, V)) * 2
    log_p = np.array(teacher - np.log(np.exp(teacher).sum()))
    ids = np.argsort(-log_p)[:K]
    noise = rng.gumbel(size=(200_000, V))
    chosen, drafted = np.argmax(log_p + noise, axis=1), np.argmax(logits + noise, axis=1)
    everything = np.arange(V)
    found = agreement(*map(mx.array, (logits, everything, log_p)), mx.array(0.0)).item()
    assert found == pytest.approx(np.mean(chosen == drafted), abs=0.005)
    # Agreement on some tokens is counted, with the others as one event that never agrees.
    tail = mx.array(1 - np.exp(log_p[ids]).sum())
    assert agreement(*map(mx.array, (logits, ids, log_p[ids])), tail).item() == pytest.approx(
        np.mean((chosen == drafted) & np.isin(chosen, ids)), abs=0.05
    )


def test_agreement_is_one_for_the_teacher_itself_and_finite_at_the_edges():
    logits = mx.array([2.0, 1.0, 0.0, -1.0])
    log_p = logits - mx.logsumexp(logits)
    everything = mx.arange(4)
    assert agreement(logits, everything, log_p, mx.array(0.0)).item() == pytest.approx(1, abs=1e-5)
    certain = mx.array([60.0, -60.0, -60.0, -60.0])
    impossible = mx.array([0.0, IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE])
    assert agreement(certain, everything, impossible, mx.array(0.0)).item() == pytest.approx(1)
    wrong = mx.array([-60.0, 60.0, -60.0, -60.0])
    for teacher in (log_p, impossible):
        value, gradient = mx.value_and_grad(agreement)(wrong, everything, teacher, mx.array(0.0))
        assert np.isfinite(value.item())
        assert mx.all(mx.isfinite(gradient)).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_position_whose_kept_tokens_all_lack_rows_has_a_gradient(recipe):
    """Such as one within a word of another script, or a character of several tokens."""
    case = Case(recipe)
    lost = mx.full(case.batch.top_ids.shape, IMPOSSIBLE)
    batch = case.batch._replace(top_log_probs=lost, tail=mx.ones((B, S)))
    value, gradient = mx.value_and_grad(case.loss)(case.logits, batch)
    assert np.isfinite(value.item())
    assert mx.all(mx.isfinite(gradient)).item()


def test_an_estimate_of_the_confidence_is_best_at_the_overlap():
    """Its part of the loss is a cross-entropy, which no other estimate makes less."""
    case = Case()
    logits = case.logits
    teacher = (case.batch.top_ids, case.batch.top_log_probs, case.batch.tail)
    shared = loss.overlap(Distribution.of(logits), *teacher)
    rows = [np.array(one).reshape(B * S, -1) for one in (logits, *teacher, shared)]
    for q, ids, p, tail, found in zip(*rows, strict=True):
        q = np.exp(q - np.logaddexp.reduce(q))
        far = np.abs(np.exp(p) - q[ids]).sum() + abs(tail[0] - np.delete(q, ids).sum())
        assert found[0] == pytest.approx(1 - far / 2, abs=1e-5)

    def total(estimate: mx.array) -> float:
        options = (case.counts, case.recipe, mx.log(mx.clip(estimate, 1e-3, 1 - 1e-3)))
        value: float = draft_loss(logits, case.batch, *options).item()
        return value

    assert total(shared) < min(total(shared + 0.05), total(shared - 0.05))

"""Loss and gradient of given logits, and of every head, against torch in float64.

Axes: S levels of drafts, V rows of the head, k kept tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.layer_sizes import layer_arguments
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import NetworkOptions, Student
from mlx_redrafter.training.batches import divide, find_draftable_steps, gather
from mlx_redrafter.training.loss import CONFIDENCE_FLOOR, POSITION_DECAY, TrainingBatch, draft_loss
from mlx_redrafter.training_options import HEADS, RECIPES, Head

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from tests.helpers import torch_heads  # noqa: E402
from tests.training.pieces import initialised, random_shard  # noqa: E402
from tests.training.test_loss import Case  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, LENGTH, LAYERS = 12, 4, 2
LENGTHS = (6, 5)


def divergence(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """KL over the kept tokens, and one event for all others."""
    kept = (log_p.exp() * (log_p - log_q[ids])).sum()
    return kept + torch.xlogy(tail, tail) - tail * _rest(log_q, ids).log()


def agreement(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """Chance that both choose the same kept token with the same noise, by pairs."""
    p = torch.cat([log_p.exp(), tail[None]])
    q = torch.cat([log_q[ids].exp(), _rest(log_q, ids)[None]])
    pairs = torch.maximum(p / p[:-1, None], q / q[:-1, None])
    return (1 / pairs.sum(1)).sum()


def distance(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """Distances of probabilities over the kept tokens, and one event for all others."""
    return (log_p.exp() - log_q[ids].exp()).abs().sum() + (tail - _rest(log_q, ids)).abs()


def _rest(log_q: Tensor, ids: Tensor) -> Tensor:
    others = torch.ones(log_q.shape[-1], dtype=torch.bool)
    others[ids] = False
    return log_q[others].exp().sum()


def reference_loss(logits: Callable[[int], Any], batch: dict[str, Tensor], recipe: str) -> Tensor:
    """The loss of a batch; ``logits`` returns those of all levels of a row, of shape (V,) each."""
    counts, total = batch["weights"].sum(0), torch.zeros((), dtype=torch.float64)
    for row, weights in enumerate(batch["weights"]):
        reached = 1.0
        for level, found in enumerate(logits(row)):
            log_q = found.log_softmax(-1)
            given = (batch[name][row, level] for name in ("top_ids", "top_log_probs", "tail"))
            on_text = -log_q[batch["tokens"][row, level + 1]]
            if recipe == "apple":
                value = on_text
            elif recipe == "overlap":
                value = (0.1 * on_text + 0.9 * distance(log_q, *given)) * POSITION_DECAY**level
            elif recipe == "soft":
                value = divergence(log_q, *given) * POSITION_DECAY**level * reached
            else:
                value = -(agreement(log_q, *given) + 1e-4).log() * POSITION_DECAY**level * reached
            if weights[level]:
                total = total + value * weights[level] / counts[level]
            label = log_q[batch["labels"][row, level]].detach()
            reached *= (1 - CONFIDENCE_FLOOR) * float(label.exp()) + CONFIDENCE_FLOOR
    return total


def _double(array: mx.array) -> Any:
    return torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64)


def _tensors(batch: TrainingBatch) -> dict[str, Any]:
    integers = ("sequences", "tokens", "labels", "top_ids")
    return {
        name: torch.tensor(np.array(array).astype(np.int64)) if name in integers else _double(array)
        for name, array in batch._asdict().items()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradient_of_given_logits(recipe):
    case = Case(recipe)
    logits = _double(case.logits).requires_grad_()
    tensors = _tensors(case.batch)
    expected = reference_loss(lambda row: logits[row], tensors, recipe)
    expected.backward()
    value, gradient = mx.value_and_grad(case.loss)(case.logits)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(np.array(gradient), logits.grad.numpy(), rtol=2e-4, atol=2e-5)


def _student(target: Target, head: Head, exit_dim: int | None) -> Student:
    """Create a student without weights of 0 or norms of 1, which would hide what they do."""
    options = NetworkOptions(head, length=LENGTH, exit_dim=exit_dim)
    if "layers" in HEADS[head]:
        options = replace(options, layers=LAYERS)
    student = initialised(target, options)
    network = student.network
    mx.random.seed(4)
    network.update(tree_map(lambda v: v + 0.1 * mx.random.normal(v.shape), network.parameters()))
    return student


def _batch(target: Target, student: Student) -> TrainingBatch:
    """Collect all positions of two texts; steps beyond the end of one do not count."""
    shard = random_shard(target, student, LENGTHS)
    steps, count = find_draftable_steps(shard, LENGTH), sum(LENGTHS)
    return gather(shard, divide(steps, count)[1], np.arange(count), count, LENGTH)


def _reference(target: Target, student: Student, weights: Any) -> Any:
    """Build the head in torch."""
    model: Any = target.model
    norm, network = model.model.norm, student.network
    outputs = target.modules.embed(mx.arange(VOCAB)), target.modules.logits(mx.eye(32)).T
    frozen = torch_heads.Frozen(
        *map(_double, (*outputs, norm.weight)), norm.eps, EagleConfig.rms_norm_eps
    )
    name = type(network).__name__
    if name in ("Drafter", "Medusa"):
        is_medusa = name == "Medusa"
        return torch_heads.medusa(weights) if is_medusa else torch_heads.recurrent(weights, frozen)
    sizes = network.config.values if name == "Mtp" else layer_arguments(network.config)
    layer = torch_heads.Layer(
        sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["rope_theta"]
    )
    if name == "Mtp":
        return torch_heads.mtp(weights, frozen, layer)
    if name == "SpecFormer":
        return torch_heads.specformer(weights, frozen, layer, len(network.config.captured_layers))
    return torch_heads.eagle(weights, frozen, layer, network.config.version)


# Block drafters have the same loss; `test_block` compares their logits with other code.
CASES = [(head, None) for head in HEADS if not head.startswith("d")]


@pytest.mark.parametrize(("kind", "exit_dim"), [*CASES, ("redrafter", 8)])
def test_loss_and_gradient_are_torchs(target, kind, exit_dim):
    student = _student(target, kind, exit_dim)
    batch, network = _batch(target, student), student.network
    counts = mx.sum(batch.weights, axis=0)

    def loss() -> mx.array:
        return draft_loss(student.logits(network, batch), batch, counts, "soft")

    value, gradient = nn.value_and_grad(network, loss)()
    weights = {
        name: _double(array).requires_grad_()
        for name, array in tree_flatten(network.trainable_parameters())
    }
    tensors = _tensors(batch)
    head, sequences = _reference(target, student, weights), batch.sequences.tolist()

    def logits(row: int) -> list[Any]:
        start, (_, *drafts, _) = sequences.index(sequences[row]), batch.tokens[row].tolist()
        following = batch.tokens[start : row + 1, 0].tolist()
        return head(tensors["states"][start : row + 1], following, drafts)  # type: ignore[no-any-return]

    expected = reference_loss(logits, tensors, "soft")
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    found = dict(tree_flatten(gradient))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        largest = float(weight.grad.abs().max())
        assert largest > 0, f"{name} takes no part"
        np.testing.assert_allclose(
            np.array(found[name]), weight.grad.numpy(), rtol=1e-3, atol=2e-4 * largest, err_msg=name
        )

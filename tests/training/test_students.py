"""Heads while they learn: their first weights, and logits and drafts, which are decoding's."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache

from mlx_redrafter import load_drafter
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.proposers.checkpoint import write_drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import (
    NetworkOptions,
    compute_head_matrix,
    new_student,
    simulate,
    train_drafter,
)
from mlx_redrafter.training import loss as loss_module
from mlx_redrafter.training.batches import divide, gather
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.students.state_students import RecurrentStudent
from mlx_redrafter.training.students.student_kinds import load_student
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import HEADS
from tests.helpers.models import (
    quantize_wide,
    random_drafter,
    tiny_llama,
    tiny_qwen3,
    wrapped_tokenizer,
)
from tests.models.tiny_models import build, tiny_config
from tests.training.conftest import check_drafts
from tests.training.pieces import Silent, drafted_texts, initialised, random_shard, sequence

VOCAB, LENGTH = 12, 4
STUDENTS = {head: NetworkOptions(head, length=LENGTH) for head in HEADS}


def _batch(shard: Shard) -> TrainingBatch:
    """All 16 positions, each of which drafts at every step."""
    _, steps = divide(np.ones((16, LENGTH - 1), np.bool_), 16)
    return gather(shard, steps, np.arange(16), 16, LENGTH)


@pytest.mark.parametrize(
    ("head", "layers"), [("redrafter", ()), ("eagle", (1, 1, 2)), ("specformer", (1, 1, 2, -1))]
)
def test_the_layers_of_a_head_are_read(target, head, layers):
    student = initialised(target, STUDENTS[head])
    assert tuple(student.layers) == layers
    states = random_shard(target, student, [9]).states
    assert (states is not None) == bool(layers)
    if states is not None:
        assert states.shape == (9, len(layers) * target.hidden_size)
    with pytest.raises(UnsupportedTargetError, match="found 40"):
        target.modules.watch((*layers, 40))


def test_a_reduced_head_has_rows_for_its_tokens(target):
    student = new_student(target, NetworkOptions("medusa", length=LENGTH, draft_vocab=2))
    student.initialise(None, 3, np.array([1, 4], np.int32))
    assert student.rows is not None
    assert student.rows.tolist() == [-1, 0, -1, -1, 1, *[-1] * (VOCAB - 5)]


@pytest.mark.parametrize("head", ["eagle", "eagle1", "specformer"])
def test_logits_along_a_text_are_those_of_drafting(target, head):
    """Row by row through a cache of mlx-lm, against all positions and levels at once."""
    student = initialised(target, STUDENTS[head])
    shard, network = random_shard(target, student, [9, 7]), student.network
    found = np.array(student.logits(network, _batch(shard)))
    states = shard.hidden if shard.states is None else shard.states
    features = network.fuse(states.astype(mx.float32))
    for start, position in [(0, t) for t in range(9 - LENGTH)] + [(9, 9 + t) for t in range(3)]:
        read, levels = features[start : position + 1], range(LENGTH - 1)
        if head == "specformer":
            slots = network.slots(network(read, mx.array([]), [KVCache()])[-1:], LENGTH - 1)[0]
            expected = [np.array(network.logits(slots, target))[level] for level in levels]
        else:
            caches, expected = [KVCache() for _ in range(network.num_layers)], []
            following = target.modules.embed(shard.tokens[start + 1 : position + 2])
            outputs = network(read, following, caches)[-1:]
            for level in levels:
                expected.append(np.array(network.logits(outputs, target)[0]))
                token = target.modules.embed(shard.tokens[position + 2 + level][None])
                outputs = network(network.feed_back(outputs), token, caches)
        np.testing.assert_allclose(found[position], expected, atol=2e-5)


# Those of the others are torch's.
@pytest.mark.parametrize("head", [head for head in HEADS if head.startswith("d")])
def test_gradients_are_true(target, head, monkeypatch):
    """In a random direction, against the difference of two losses."""
    student = initialised(target, STUDENTS[head])
    batch = _batch(random_shard(target, student, [16]))
    counts = mx.sum(batch.weights, axis=0)
    # Without the confidence, through which no gradient flows.
    monkeypatch.setattr(loss_module, "CONFIDENCE_FLOOR", 1)
    network = student.network

    def loss() -> mx.array:
        return draft_loss(student.logits(network, batch), batch, counts, "soft")

    _, gradient = nn.value_and_grad(network, loss)()
    weights = network.trainable_parameters()
    direction = tree_map(lambda value: mx.random.normal(value.shape), weights)
    parts = tree_map(lambda a, b: mx.sum(a * b), gradient, direction)
    expected = sum(value.item() for _, value in tree_flatten(parts))
    size, losses = 1e-3, []
    for sign in (1, -1):
        network.update(tree_map(lambda a, b, s=sign: a + s * size * b, weights, direction))
        losses.append(loss().item())
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("head", STUDENTS)
def test_counted_steps_are_those_of_decoding(target, head):
    student = initialised(target, STUDENTS[head])
    drafter = student.with_weights({}).network  # decoding hooks it
    options = {"max_tokens": 40, "beam_width": 1, "beam_length": LENGTH}
    calls = [([1, 2, 3], options), ([5, 4, 3, 2, 1, 6, 7], options)]
    tokenizer = wrapped_tokenizer(VOCAB, set())
    sequences, tokens, steps = drafted_texts(target.model, tokenizer, drafter, calls)
    shard = read_sequences(target, sequences, VOCAB, student.layers)
    found = simulate(student, [shard], LENGTH)
    assert (found.num_tokens - 1, found.steps) == (tokens, steps)
    assert steps < tokens, "some drafts are right by chance"


@pytest.mark.parametrize(("head", "epochs"), [("eagle", 2), ("specformer", 3)])
def test_trained_heads(tmp_path, finished, cli, head, epochs):
    """On the texts of another run, of which more layers are read."""
    earlier, out = finished.request, tmp_path / "head"
    network = NetworkOptions(head, draft_vocab=300 if head == "eagle" else None)
    training = replace(earlier.training, epochs=epochs)
    request = replace(earlier, out=out, cache=earlier.cache_folder, network=network)
    reporter = Silent()
    result = train_drafter(replace(request, training=training), reporter)
    # Nothing is missing but the inputs of the layers.
    assert re.fullmatch(r"needs .*: reading .*, training .*, evaluation .*", reporter.lines[1])
    assert result.measured.tokens_per_step > 1.15
    used = check_drafts(cli, Path(request.model), out, "Once", "-m", 40, "--beam-length", 4)
    assert used["tokens_per_step"] > 1.1
    name = result.student.name
    assert name[0].upper() + name[1:] in (out / "README.md").read_text()


def test_what_a_head_cannot_have_is_refused():
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("eagle", {"exit_dim": 8}, "exit_dim has no meaning for the head eagle"),
        ("eagle1", {"draft_vocab": 8}, "draft_vocab has no meaning for the head eagle1"),
        ("specformer", {"layers": 1}, "layers has no meaning for the head specformer"),
        ("hydra", {}, "head must be one of redrafter, medusa, eagle"),
        ("medusa", {"start_from": "x"}, "recurrent or block drafter only, got the head medusa"),
        ("dflash", {"start_from": "x", "layers": 1}, "x keeps its shape; leave layers out"),
    ]
    for head, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            NetworkOptions(head, **options)


def test_a_drafter_of_fewer_tokens_is_not_trained_on(target, tmp_path):
    """Its rows end before the target's token ids do."""
    path, tokenizer = tmp_path / "drafter", wrapped_tokenizer(VOCAB - 1)
    write_drafter(random_drafter(VOCAB - 1, target.hidden_size), path)
    with pytest.raises(ConfigError, match=r"drafter of 12 token ids .* found one of 11"):
        load_student(str(path), "redrafter", target, tokenizer)


# Simulated steps


PROMPTS = ("One day, a little", "Tom had a red ball.", "The cat and the dog", "It was night")


def test_simulated_with_noise_equals_decoding_with_a_seed(stories, finished):
    """Compare averages, because the simulation draws other noise."""
    temp = 0.8
    drafter = load_drafter(finished.request.out)
    drafter.set_dtype(mx.float32)
    shape = {"beam_width": 1, "beam_length": 5, "max_tokens": 80, "temp": temp}
    prompts = [stories.tokenizer.encode(prompt) for prompt in PROMPTS]
    calls = [(ids, {**shape, "seed": seed}) for seed in range(6) for ids in prompts]
    sequences, tokens, steps = drafted_texts(stories.model, stories.tokenizer, drafter, calls)
    target = Target(stories.model)
    shard = read_sequences(target, sequences, 512)
    student = RecurrentStudent(drafter, target.modules.embed)
    found, without = simulate(student, [shard], 5, temp), simulate(student, [shard], 5)
    assert found.tokens_per_step == pytest.approx(tokens / steps, rel=0.05)
    assert without.tokens_per_step < 0.95 * found.tokens_per_step


def test_texts_with_nothing_to_draft_are_left_out(target):
    shard = read_sequences(target, [sequence([1, 2, 3], 2)], 4)
    student = RecurrentStudent(random_drafter(VOCAB, 32), target.modules.embed)
    found = simulate(student, [shard], 5)
    assert (found.steps, found.tokens_per_step) == (0, None)


# The weights that training starts from


LM_HEADS = {
    "llama": tiny_llama,
    "tied": tiny_qwen3,
    # Heads of other names, and with biases.
    **{
        name: partial(build, tiny_config(name))
        for name in ("gpt_neox", "internlm2", "phi", "phixtral")
    },
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", LM_HEADS)
def test_the_head_matrix_gives_the_targets_logits(name, bits):
    model = LM_HEADS[name]()
    if bits is not None:
        quantize_wide(model, bits=bits)
    target = Target(model)
    head, states = compute_head_matrix(target), mx.random.normal((4, target.hidden_size))
    logits, bias = map(target.modules.logits, (states, mx.zeros_like(states)))
    np.testing.assert_allclose(np.array(states @ head.T), np.array(logits - bias), atol=1e-3)


def test_a_wide_head_holds_the_targets_and_blocks_do_nothing(target):
    head = compute_head_matrix(target)
    drafter = initialised(target, NetworkOptions(), head).network
    assert drafter.config.exit_dim == 64
    assert not drafter.config.has_input_proj
    x = mx.random.normal((3, 64))
    assert mx.array_equal(drafter.lm_head[0](x), x).item()
    assert mx.array_equal(drafter.lm_head[-1].weight[:, :32], head).item()


def test_a_narrow_head_is_the_nearest_of_its_rank(target):
    head = compute_head_matrix(target)
    drafter = initialised(target, NetworkOptions(exit_dim=8), head).network
    assert drafter.config.has_input_proj
    weight = np.array(drafter.lm_head[-1].weight)
    full = np.array(head)
    left, values, _ = np.linalg.svd(full, full_matrices=False)
    # Its columns span the leading left singular vectors, with their lengths.
    projected = left[:, :8] @ (left[:, :8].T @ weight)
    np.testing.assert_allclose(projected, weight, atol=1e-3)
    np.testing.assert_allclose(np.linalg.svd(weight)[1], values[:8], rtol=1e-3)


def test_the_seed_decides(target):
    options = NetworkOptions(exit_dim=8)
    first, again, other = (initialised(target, options, seed=seed).network for seed in (1, 1, 2))
    assert mx.array_equal(first.rnn_w.weight, again.rnn_w.weight).item()
    assert not mx.array_equal(first.rnn_w.weight, other.rnn_w.weight).item()

"""The rehearsal of a run: every stage takes some time, whatever the run is like."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.target import Target, is_slow
from mlx_redrafter.training import (
    DataOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
    new_student,
    rehearsal,
    teacher,
)
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import RECIPES, Recipe
from tests.helpers.models import tiny_llama

REQUEST = TrainingRequest(
    "model", Path("none"), data=[Path("texts")], training=TrainingOptions(batch_tokens=64)
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_stage_takes_time(target: Target, recipe: Recipe) -> None:
    request = replace(REQUEST, training=replace(REQUEST.training, recipe=recipe))
    stages: list[int] = []
    student = new_student(target, request.network)
    pace = rehearse(request, target, student, [[1, 2, 3]], 0, lambda done, _: stages.append(done))
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2, 3, 4}
    assert all(seconds > 0 for seconds in astuple(pace))


def test_short_contexts_and_reduced_heads(target: Target) -> None:
    request = replace(
        REQUEST,
        network=NetworkOptions(exit_dim=8, length=2, draft_vocab=5),
        data_options=DataOptions(sequence_length=16, temp=0.0),
    )
    student = new_student(target, request.network)
    prompts = [[1], list(range(40))]
    assert rehearse(request, target, student, prompts, 0, lambda done, total: None).step > 0


def test_a_target_that_cannot_teach_is_refused_at_once() -> None:
    model = tiny_llama()
    model.model.norm.weight = model.model.norm.weight * mx.nan
    target = Target(model)
    student = new_student(target, REQUEST.network)
    with pytest.raises(NonFiniteError, match="cannot be used as a teacher"):
        rehearse(REQUEST, target, student, [[1, 2, 3]], 0, lambda done, total: None)


def test_what_is_timed_is_like_the_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are read that are as long as can be, and more tokens are written than begin texts."""
    read: list[list[int]] = []
    written: list[tuple[int, int]] = []
    generate_round = rehearsal.TextGenerator.generate_round

    def read_sequences(target: Target, sequences: list[Any], *options: Any) -> Shard:
        read.append([len(one) for one in sequences])
        return teacher.read_sequences(target, sequences, *options)

    def generate(generator: Any, jobs: Any, options: DataOptions, *others: Any) -> Any:
        written.append((len(jobs), options.answer_tokens))
        return generate_round(generator, jobs, options, *others)

    monkeypatch.setattr(rehearsal, "read_sequences", read_sequences)
    monkeypatch.setattr(rehearsal.TextGenerator, "generate_round", generate)
    request = REQUEST
    student = new_student(target, NetworkOptions("eagle"))
    rehearse(request, target, student, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], 10**6, lambda *_: None)
    assert written == [(128, 16)]
    assert read == [[8] * 8, [64] * 8], "the first pass is not timed"
    short = replace(request, data_options=DataOptions(sequence_length=32))
    rehearse(short, target, student, [[1] * 9], 5000, lambda *_: None)
    assert written[1] == (20, 16), "as many texts at once as in the run"
    assert read[3] == [32] * 8


def test_half_precision_on_a_cpu_is_slow() -> None:
    on_cpu = "cpu" in str(mx.default_device())
    model = tiny_llama()
    for dtype, slow in (mx.float32, False), (mx.float16, on_cpu), (mx.bfloat16, on_cpu):
        model.set_dtype(dtype)
        assert is_slow(Target(model)) == slow
    nn.quantize(model, 32, class_predicate=lambda _, layer: isinstance(layer, nn.Embedding))
    assert not is_slow(Target(model))

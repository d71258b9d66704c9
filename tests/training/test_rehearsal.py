"""The rehearsal of a run: every stage takes some time, whatever the run is like."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import (
    DataOptions,
    LossOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
    new_student,
)
from mlx_redrafter.training.options import RECIPES, Recipe
from mlx_redrafter.training.rehearsal import rehearse
from tests.helpers.models import tiny_llama

REQUEST = TrainingRequest(
    "model", Path("none"), data=[Path("texts")], training=TrainingOptions(batch_tokens=64)
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_stage_takes_time(target: Target, recipe: Recipe) -> None:
    request = replace(REQUEST, loss=LossOptions(recipe=recipe))
    stages: list[int] = []
    student = new_student(target, request.network)
    pace = rehearse(request, target, student, [[1, 2, 3]], lambda done, _: stages.append(done))
    assert stages == [0, 1, 2, 3, 4]
    assert (pace.rollout > 0) == (recipe == "rollouts")
    assert all(seconds > 0 for seconds in astuple(replace(pace, rollout=1.0)))


def test_short_contexts_and_reduced_heads(target: Target) -> None:
    request = replace(
        REQUEST,
        network=NetworkOptions(exit_dim=8, beam_length=2, draft_vocab=5),
        data_options=DataOptions(sequence_length=16, temp=0.0),
    )
    student = new_student(target, request.network)
    prompts = [[1], list(range(40))]
    assert rehearse(request, target, student, prompts, lambda done, total: None).step > 0


def test_a_target_that_cannot_teach_is_refused_at_once() -> None:
    model = tiny_llama()
    model.model.norm.weight = model.model.norm.weight * mx.nan
    target = Target(model)
    student = new_student(target, REQUEST.network)
    with pytest.raises(NonFiniteError, match="cannot be used as a teacher"):
        rehearse(REQUEST, target, student, [[1, 2, 3]], lambda done, total: None)

"""Step times: which there are, and that a second run reads them instead of timing again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Drafter, load
from mlx_redrafter.policy import profiling
from mlx_redrafter.policy.adaptive import CANDIDATES, LONGEST, SHORTEST, TREES
from mlx_redrafter.proposers.redrafter.checkpoint import quantize_drafter
from mlx_redrafter.proposers.redrafter.proposer import RecurrentProposer
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-redrafter"


def _proposer(dtype: mx.Dtype = mx.float32) -> RecurrentProposer:
    return RecurrentProposer(random_drafter(64, 32, dtype=dtype))


def test_every_shape_is_timed_once_per_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    seconds = profiling.step_costs(target, proposer)
    assert set(seconds) == {None, *CANDIDATES}
    assert all(value > 0 for value in seconds.values())
    assert len(list(folder.iterdir())) == 1

    monkeypatch.setattr(profiling, "time_steps", lambda *_: pytest.fail("timed again"))
    assert profiling.step_costs(target, proposer) == seconds


def test_a_long_context_is_timed_when_a_text_begins_with_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    target.context_length = None
    timed = {
        profiling.CONTEXT: dict.fromkeys(profiling.TIMED, 2.0)
        | {None: 1.0, profiling.SMALLEST: 1.5},
        profiling.LONG_CONTEXT: dict.fromkeys(profiling.TIMED, 4.0) | {None: 1.5, LONGEST: 1.9},
    }
    monkeypatch.setattr(profiling, "time_steps", lambda target, proposer, context: timed[context])
    short = {plan: 2.0 - 0.1 * (8 - plan.shape.length) for plan in CANDIDATES} | {None: 1.0}
    assert profiling.step_costs(target, proposer) == pytest.approx(short)
    assert profiling.step_costs(target, proposer, profiling.LEAST_LONG - 1) == pytest.approx(short)
    assert len(list(folder.iterdir())) == 1
    seconds = profiling.step_costs(target, proposer, profiling.LONG_CONTEXT)
    assert len(list(folder.iterdir())) == 2
    assert (seconds[None], seconds[LONGEST]) == (1.5, 2.0), "no context makes a step faster"
    assert seconds[profiling.SMALLEST] == pytest.approx(3.5), "or a level slower"
    twice = profiling.step_costs(target, proposer, 2 * profiling.LONG_CONTEXT - profiling.CONTEXT)
    assert [twice[plan] for plan in (None, profiling.SMALLEST, LONGEST)] == pytest.approx(
        [2, 5.5, 2]
    )


def test_a_level_takes_the_same_whatever_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = LONGEST.shape.levels - SHORTEST.shape.levels
    timed = {None: 1.0, profiling.SMALLEST: 2.0} | {
        plan: 2.0 + 0.1 * levels + 0.01 * (plan.num_nodes - 2) for plan in TREES[LONGEST].values()
    }
    monkeypatch.setattr(profiling, "time_steps", lambda *_: timed)
    seconds = profiling.step_costs(Target(tiny_llama()), _proposer())
    assert {plan: seconds[plan] for plan in timed} == pytest.approx(timed)
    for plan in CANDIDATES:
        nodes, length = plan.num_nodes, plan.shape.length
        expected = 2.0 + 0.1 * (length - SHORTEST.shape.length) + 0.01 * (nodes - 2)
        assert seconds[plan] == pytest.approx(expected)


def test_times_that_noise_has_turned_round_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = dict.fromkeys(profiling.TIMED, 1.5) | {None: 1.0}
    for smallest, bound in ((9.0, 1.5), (0.1, 1.0)):
        noisy = timed | {profiling.SMALLEST: smallest}
        monkeypatch.setattr(profiling, "_known_costs", lambda *_, noisy=noisy: noisy)
        seconds = profiling.step_costs(Target(tiny_llama()), _proposer())
        assert min(seconds.values()) == 1.0
        assert min(seconds[plan] for plan in CANDIDATES) == bound


def test_positions_that_a_model_need_not_know_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    target.context_length = 2 * profiling.LONG_CONTEXT - 1
    short = dict.fromkeys(profiling.TIMED, 2.0) | {None: 1.0}
    monkeypatch.setattr(
        profiling,
        "time_steps",
        lambda target, proposer, context: {profiling.CONTEXT: short}[context],
    )
    assert profiling.step_costs(target, proposer, 4000)[LONGEST] == 2.0


def test_drafts_that_would_be_right_leave_all_shapes_at_one_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, drafter = load()
    assert isinstance(drafter, Drafter)
    target, caches = Target(model), []
    blank_cache = target.blank_cache

    def remembered(length: int) -> TreeCache:
        caches.append(blank_cache(length))
        return caches[-1]

    monkeypatch.setattr(target, "blank_cache", remembered)
    profiling.time_steps(target, RecurrentProposer(drafter))
    steps = profiling.ROUNDS * profiling.STEPS * len(profiling.TIMED)
    assert caches[0].length <= 1.1 * (profiling.CONTEXT + steps)


def test_steps_after_a_long_context_are_timed_without_processing_it() -> None:
    model, lengths = tiny_llama(), []

    class Watched(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            lengths.append((tokens.shape[1], kwargs["cache"][0].offset))
            return super().__call__(tokens, *args, **kwargs)  # type: ignore[no-any-return]

    target = Target(model)
    model.__class__ = Watched
    profiling.time_steps(target, _proposer(), 4000)
    assert max(tokens for tokens, _ in lengths) == LONGEST.num_nodes
    assert {offset >= 4000 for tokens, offset in lengths if tokens > 1} == {True}


def test_another_drafter_or_dtype_is_timed_anew(folder: Path) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    profiling.step_costs(target, proposer)
    quantize_drafter(proposer.drafter, 4, 32)
    profiling.step_costs(target, proposer)
    profiling.step_costs(target, _proposer(mx.float16))
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plain": "fast"}'])
def test_a_damaged_file_is_replaced(folder: Path, text: str) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    seconds = profiling.step_costs(target, proposer)
    (path,) = folder.iterdir()
    path.write_text(text)
    profiling.step_costs(target, proposer)
    assert profiling.step_costs(target, proposer).keys() == seconds.keys()
    assert path.read_text() != text


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        profiling.step_costs(Target(tiny_llama()), _proposer())
    assert "not kept" in caplog.text


def test_timing_leaves_the_model_alone() -> None:
    model = tiny_llama()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = model(tokens)
    profiling.time_steps(Target(model), _proposer())
    assert mx.array_equal(model(tokens), before)

"""Step times: which there are, and that a second run reads them instead of timing again."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_redrafter.engine.engine
from mlx_redrafter import Drafter, Engine, load
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.measured import DOUBTS, MOST_DOUBTS, MOST_RUNS
from mlx_redrafter.policy import profiling
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.policy.profiling import StepTimes
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-redrafter"


def _proposer(dtype: mx.Dtype = mx.float32) -> Drafter:
    return random_drafter(64, 32, dtype=dtype)


def _timed(
    per_node: float = 0.01, per_level: float = 0.1, read: float = 0.3, max_length: int = 99
) -> profiling.Seconds:
    """Times of a machine where plain decoding takes 1, and searches take longer by their width."""

    def seconds(kind: profiling.Kind) -> float:
        if kind.plan is None:
            return 1.0
        shape = kind.plan.within(max_length).shape
        drafting = 0.4 + per_level * shape.levels * shape.width / 2 + 0.05 * (shape.width - 2)
        if not kind.verifies:
            return 1 + drafting
        return 2 + per_node * kind.plan.num_nodes + drafting + read * kind.waits

    return {kind: seconds(kind) for kind in profiling.TIMED}


def test_steps_are_timed_once_per_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    monkeypatch.setattr(profiling._Schedule, "is_doubtful", lambda *_: False)
    costs = profiling.step_costs(target, proposer)
    assert costs.plain > 0
    assert set(costs.verify) == set(SIZES)
    assert len(list(folder.iterdir())) == 1

    monkeypatch.setattr(profiling, "time_steps", lambda *_: pytest.fail("timed again"))
    assert profiling.step_costs(target, proposer) == costs


def test_times_that_were_disturbed_are_measured_again_by_the_next_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer, runs = Target(tiny_llama()), _proposer(), []

    def times(*_: object) -> StepTimes:
        """Every run is disturbed elsewhere, and the last one everywhere."""
        runs.append(len(runs))
        disturbed = [profiling.PLAIN, profiling.READ, *profiling.TIMED][runs[-1]]
        seconds = {kind: 1 + (runs[-1] > 1) + 0.01 * len(str(kind)) for kind in profiling.TIMED}
        return StepTimes(seconds | {disturbed: 9.0}, is_doubtful=True)

    monkeypatch.setattr(profiling, "time_steps", times)
    assert profiling.step_costs(target, proposer).plain == 9
    for _ in range(MOST_RUNS + 2):
        after = profiling.step_costs(target, proposer)
        assert after.plain == pytest.approx(1.05)
        assert after.wait == pytest.approx(0.05), "the fastest of all runs count"
    assert len(runs) == MOST_RUNS


def test_a_second_look_ends_what_was_doubtful(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    for is_doubtful in (True, False):
        monkeypatch.setattr(
            profiling, "time_steps", lambda *_, doubt=is_doubtful: StepTimes(_timed(), doubt)
        )
        profiling.step_costs(target, proposer)
    monkeypatch.setattr(profiling, "time_steps", lambda *_: pytest.fail("timed again"))
    profiling.step_costs(target, proposer)


def test_steps_that_take_long_have_one_turn() -> None:
    now = 0.0
    schedule = profiling._Schedule(profiling.TIMED, clock=lambda: now)
    plan = schedule.choose(None)
    while not schedule.is_done:
        following = schedule.choose(None)
        now += profiling.PATIENCE / 20
        schedule.observe(Step(plan, 2, [1], 1.0))
        plan = following
    assert {len(turns) for turns in schedule._turns.values()} == {1}
    assert set(schedule.seconds.values()) == {1.0}
    assert not any(map(schedule.is_doubtful, profiling.TIMED))


def test_drafts_out_of_the_text_are_timed_without_a_network(folder: Path) -> None:
    costs = profiling.step_costs(Target(tiny_llama()), None)
    assert set(costs.verify) == set(SIZES)
    assert not costs.level
    assert costs.wait == 0


@pytest.mark.parametrize("max_length", [2, 3, 5, 99])
def test_parts_add_up_to_the_steps_that_were_timed(
    monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    timed, proposer = _timed(max_length=max_length), _proposer()
    monkeypatch.setattr(Drafter, "max_length", max_length)
    monkeypatch.setattr(profiling, "time_steps", lambda *_: StepTimes(timed))
    costs = profiling.step_costs(Target(tiny_llama()), proposer)
    for kind, seconds in timed.items():
        plan = kind.plan
        num_nodes = plan.num_nodes if plan and kind.verifies else 1
        shape = plan and plan.within(max_length).shape
        found = costs.step(shape, num_nodes, kind.waits)
        assert found == pytest.approx(seconds)
    if max_length < 6:
        return
    between = costs.drafting(DraftShape(3, 6)) - costs.drafting(DraftShape(2, 6))
    assert between == pytest.approx(0.1 * 5 / 2 + 0.05), "widths in between are interpolated"


def test_a_long_context_is_timed_when_a_text_begins_with_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    target.context_length = None
    short = _timed()
    long = {kind: seconds + 0.5 for kind, seconds in short.items()}
    long[profiling.VERIFY[2]] = 0.1  # noise
    timed = {profiling.CONTEXT: short, profiling.LONG_CONTEXT: long}
    monkeypatch.setattr(
        profiling, "time_steps", lambda target, proposer, context, how: StepTimes(timed[context])
    )
    costs = profiling.step_costs(target, proposer)
    assert profiling.step_costs(target, proposer, profiling.MIN_LONG - 1) == costs
    assert len(list(folder.iterdir())) == 1
    after = profiling.step_costs(target, proposer, profiling.LONG_CONTEXT)
    assert len(list(folder.iterdir())) == 2
    assert after.plain == 1.5
    assert after.verify[8] == pytest.approx(costs.verify[8] + 0.5)
    assert after.verify[2] == pytest.approx(costs.verify[2]), "no context makes a step faster"
    assert after.level == costs.level, "or a level slower"
    twice = profiling.step_costs(target, proposer, 2 * profiling.LONG_CONTEXT - profiling.CONTEXT)
    assert twice.plain == pytest.approx(2.0)


def test_times_that_noise_has_turned_round_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for per_level, read in ((-0.5, -3.0), (9.0, 0.0)):
        timed = _timed(per_level=per_level, read=read)
        monkeypatch.setattr(profiling, "_known_seconds", lambda *_, timed=timed: timed)
        costs = profiling.step_costs(Target(tiny_llama()), _proposer())
        assert min(costs.verify.values()) >= profiling.MIN_VERIFY * costs.plain > 0
        assert min(costs.level.values()) >= 0
        assert costs.wait >= 0
        assert costs.drafting(DraftShape(1, 2)) >= 0


def test_drafting_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = _timed() | {profiling.VERIFY[profiling.FEW]: 9.0}  # something disturbed it
    monkeypatch.setattr(profiling, "_known_seconds", lambda *_: timed)
    costs = profiling.step_costs(Target(tiny_llama()), _proposer())
    for width, seconds in costs.level.items():
        assert costs.drafting(DraftShape(width, 6)) >= 5 * seconds


def test_what_was_disturbed_is_timed_again() -> None:
    kinds = [profiling.PLAIN, profiling.READ, profiling.VERIFY[2]]
    schedule = profiling._Schedule(kinds)
    rng, plan, turn = random.Random(3), schedule.choose(None), 0
    while not schedule.is_done:
        following = schedule.choose(None)
        turn += plan == profiling.VERIFY[2].plan
        seconds = 5.0 if plan == profiling.VERIFY[2].plan and turn < 9 else 1.0
        schedule.observe(Step(plan, 2, [1], seconds * rng.uniform(0.99, 1.01)))
        plan = following
    assert all(seconds < 1.1 for seconds in schedule.seconds.values())
    assert turn > profiling.ROUNDS * profiling.STEPS, "this one had more turns"
    assert len(schedule._turns[profiling.PLAIN]) == profiling.ROUNDS


def test_steps_that_took_longer_than_ones_that_do_more_are_timed_again() -> None:
    few, many = profiling.VERIFY[2], profiling.VERIFY[8]
    schedule = profiling._Schedule([profiling.PLAIN, few, many])
    plan, turn = schedule.choose(None), 0
    while not schedule.is_done:
        following = schedule.choose(None)
        turn += plan == few.plan
        disturbed = plan == few.plan and turn <= profiling.ROUNDS * profiling.STEPS
        schedule.observe(Step(plan, 2, [1], 5.0 if disturbed else 2.0 if plan else 1.0))
        plan = following
    assert schedule.seconds == {profiling.PLAIN: 1.0, few: 2.0, many: 2.0}


def test_positions_that_a_model_need_not_know_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, proposer = Target(tiny_llama()), _proposer()
    target.context_length = 2 * profiling.LONG_CONTEXT - 1
    monkeypatch.setattr(
        profiling,
        "time_steps",
        lambda target, proposer, context, how: StepTimes({profiling.CONTEXT: _timed()}[context]),
    )
    assert profiling.step_costs(target, proposer, 4000).plain == 1


def test_drafts_that_would_be_right_leave_all_shapes_at_one_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, drafter = load()
    assert isinstance(drafter, Drafter)
    target, caches = Target(model), []
    blank_cache = target.blank_cache

    def remembered(length: int, quantisation: None) -> TreeCache:
        caches.append(blank_cache(length))
        return caches[-1]

    monkeypatch.setattr(target, "blank_cache", remembered)
    profiling.time_steps(target, drafter)
    steps = profiling.MAX_ROUNDS * profiling.STEPS * len(profiling.TIMED)
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
    assert max(tokens for tokens, _ in lengths) == SIZES[-1]
    assert {offset >= 4000 for tokens, offset in lengths if tokens > 1} == {True}


def test_another_drafter_or_dtype_is_timed_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "time_steps", lambda *_: StepTimes(_timed()))
    target, proposer = Target(tiny_llama()), _proposer()
    profiling.step_costs(target, proposer)
    quantize_drafter(proposer, 4, 32)
    profiling.step_costs(target, proposer)
    profiling.step_costs(target, _proposer(mx.float16))
    assert len(list(folder.iterdir())) == 3


BAD = {"zero": 0.0, "NaN": math.nan, "-1": -1.0, "Infinity": math.inf}


def test_times_that_use_shows_to_be_too_long_are_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was busy all the while it was timed, so that no turn differs from another."""
    model, runs = tiny_llama(vocab_size=VOCAB_SIZE), []
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))

    def busy(*_: object) -> StepTimes:
        runs.append(len(runs))
        return StepTimes({kind: 100 * seconds for kind, seconds in _timed().items()})

    monkeypatch.setattr(profiling, "time_steps", busy)
    monkeypatch.setattr(mlx_redrafter.engine.engine, "step_costs", profiling.step_costs)
    for _ in range(MOST_DOUBTS + 3):
        engine.generate([5, 6, 7], max_tokens=60)
        assert engine.memory.experience is not None
    assert len(runs) == 1 + MOST_DOUBTS, "not for ever, where the longer times are confirmed"
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())[DOUBTS] == MOST_DOUBTS


def test_a_text_without_coupling_leaves_no_slowdowns_of_times_that_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))
    busy = {kind: 100 * seconds for kind, seconds in _timed().items()}
    monkeypatch.setattr(profiling, "time_steps", lambda *_: StepTimes(busy))
    monkeypatch.setattr(mlx_redrafter.engine.engine, "step_costs", profiling.step_costs)
    engine.generate([5, 6, 7], max_tokens=6)  # too few steps for a doubt
    assert engine.memory.timed
    experience = engine.memory.experience
    assert experience is not None
    assert experience.ratios._own
    engine.generate([5, 6, 7], max_tokens=60, couple=False)
    assert not engine.memory.timed
    assert engine.memory.experience is experience
    assert not experience.ratios._own


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plain": "fast"}', "zero", "NaN", "-1", "Infinity"]
)
def test_a_damaged_file_is_replaced(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "time_steps", lambda *_: StepTimes(_timed()))
    target, proposer = Target(tiny_llama()), _proposer()
    profiling.step_costs(target, proposer)
    (path,) = folder.iterdir()
    names = json.loads(path.read_text())
    path.write_text(
        text if not text or text[0] in "[{" else json.dumps(dict.fromkeys(names, BAD[text]))
    )
    profiling.step_costs(target, proposer)
    after = json.loads(path.read_text())
    assert after.keys() == names.keys()
    assert all(0 < value < 100 for value in after.values())


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

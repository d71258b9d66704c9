"""Costs of steps: how they are timed, their parts, and what is stored for the next run."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

import mlx_redrafter.engine.engine
from mlx_redrafter import Drafter, Engine, load
from mlx_redrafter.bench.lab.scenarios import step_seconds
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.engine import stored_costs
from mlx_redrafter.engine.stored_costs import CONTEXT, PLAIN, READ, VERIFY, Kind, Seconds
from mlx_redrafter.measured import MOST_RUNS, doubt, fastest, load_or_time
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.calls import at_call
from tests.helpers.few_shapes import compile_passes
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
KINDS = stored_costs.kinds_of(random_drafter(64, 32))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-redrafter"


@pytest.fixture
def pair() -> tuple[Target, Drafter]:
    return Target(tiny_llama()), random_drafter(64, 32)


def _timed(
    per_node: float = 0.01, per_level: float = 0.1, read: float = 0.3, max_length: int = 99
) -> dict[Kind, float]:
    """Times of a machine where plain decoding takes 1, and searches take longer by their width."""

    def seconds(kind: Kind) -> float:
        if kind.plan is None:
            return 1.0
        shape = kind.plan.within(max_length).shape
        drafting = 0.4 + per_level * shape.levels * shape.width / 2 + 0.05 * (shape.width - 2)
        if not kind.verifies:
            return 1 + drafting
        return 2 + per_node * kind.plan.num_nodes + drafting + read * kind.waits

    return {kind: seconds(kind) for kind in KINDS}


def test_steps_are_timed_once_per_pair(pair, folder, monkeypatch):
    monkeypatch.setattr(stored_costs, "is_doubtful", lambda _: False)
    monkeypatch.setattr(stored_costs, "MAX_ROUNDS", 1)
    costs, lookups = stored_costs.step_costs(*pair), stored_costs.step_costs(pair[0], None)
    assert costs.plain > 0
    assert set(costs.verify) == set(lookups.verify) == set(SIZES)
    assert (lookups.level, lookups.wait) == ({}, 0)
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(stored_costs, "time_steps", lambda *_: pytest.fail("timed again"))
    assert stored_costs.step_costs(*pair) == costs


@pytest.mark.parametrize("max_length", [2, 5, 99])
def test_parts_add_up_to_the_steps_that_were_timed(pair, monkeypatch, max_length):
    timed = _timed(max_length=max_length)
    monkeypatch.setattr(Drafter, "max_length", max_length)
    monkeypatch.setattr(stored_costs, "time_steps", lambda *_: [timed])
    costs = stored_costs.step_costs(*pair)
    for kind, seconds in timed.items():
        plan = kind.plan
        num_nodes = plan.num_nodes if plan and kind.verifies else 1
        shape = plan and plan.within(max_length).shape
        found = step_seconds(costs, shape, num_nodes, kind.waits)
        assert found == pytest.approx(seconds)
    if max_length < 6:
        return
    between = costs.drafting(DraftShape(3, 6)) - costs.drafting(DraftShape(2, 6))
    assert between == pytest.approx(0.1 * 5 / 2 + 0.05), "widths in between are interpolated"


def test_a_long_context_is_timed_when_a_text_begins_with_one(pair, folder, monkeypatch):
    target, far = pair[0], 2 * stored_costs.LONG_CONTEXT
    target.context_length = None
    short = _timed()
    long = {kind: seconds + 0.5 for kind, seconds in short.items()}
    long[stored_costs.VERIFY[2]] = 0.1  # noise
    timed = {stored_costs.CONTEXT: short, stored_costs.LONG_CONTEXT: long}
    monkeypatch.setattr(stored_costs, "time_steps", lambda setting: [timed[setting.context]])
    costs = stored_costs.step_costs(*pair)
    assert stored_costs.step_costs(*pair, stored_costs.MIN_LONG - 1) == costs
    assert len(list(folder.iterdir())) == 1
    after = stored_costs.step_costs(*pair, stored_costs.LONG_CONTEXT)
    assert len(list(folder.iterdir())) == 2
    assert after.plain == 1.5
    assert after.verify[8] == pytest.approx(costs.verify[8] + 0.5)
    assert after.verify[2] == pytest.approx(costs.verify[2]), "no context makes a step faster"
    assert after.level == costs.level, "or a level slower"
    assert stored_costs.step_costs(*pair, far - stored_costs.CONTEXT).plain == pytest.approx(2.0)
    # Positions that a model need not know are not timed.
    target.context_length = far - 1
    del timed[stored_costs.LONG_CONTEXT]
    assert stored_costs.step_costs(*pair, 4000).plain == 1


def test_times_that_noise_has_turned_round_stay_in_bounds(pair, monkeypatch):
    for per_level, read in ((-0.5, -3.0), (9.0, 0.0)):
        timed = _timed(per_level=per_level, read=read)
        monkeypatch.setattr(stored_costs, "_load_or_time", lambda *_, timed=timed: timed)
        costs = stored_costs.step_costs(*pair)
        assert min(costs.verify.values()) >= stored_costs.MIN_VERIFY * costs.plain > 0
        assert min(costs.level.values()) >= 0
        assert costs.wait >= 0
        assert costs.drafting(DraftShape(1, 2)) >= 0
    disturbed = _timed() | {stored_costs.VERIFY[stored_costs.FEW]: 9.0}
    monkeypatch.setattr(stored_costs, "_load_or_time", lambda *_: disturbed)
    costs = stored_costs.step_costs(*pair)
    for width, seconds in costs.level.items():
        assert costs.drafting(DraftShape(width, 6)) >= 5 * seconds, "drafting is never free"


def test_another_drafter_or_dtype_is_timed_anew(pair, folder, monkeypatch):
    monkeypatch.setattr(stored_costs, "time_steps", lambda *_: [_timed()])
    stored_costs.step_costs(*pair)
    quantize_drafter(pair[1], 4, 32)
    stored_costs.step_costs(*pair)
    stored_costs.step_costs(pair[0], random_drafter(64, 32, dtype=mx.float16))
    assert len(list(folder.iterdir())) == 3


def test_times_that_use_shows_to_be_too_long_are_measured_again_by_later_runs(folder, monkeypatch):
    """A machine that was busy all the while it was timed, so that no turn differs from another."""
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    busy = Mock(return_value=[{kind: 100 * seconds for kind, seconds in _timed().items()}])
    monkeypatch.setattr(stored_costs, "time_steps", busy)
    monkeypatch.setattr(mlx_redrafter.engine.engine, "step_costs", stored_costs.step_costs)
    for run in range(4):
        engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))
        for _ in range(2):
            engine.generate([5, 6, 7], max_tokens=60)
            assert busy.call_count == 1 + run, "not in a run that has timed"
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text())["runs"] == 4 < MOST_RUNS


def test_no_text_meets_a_shape_that_the_warm_up_has_not_used(monkeypatch):
    """A GPU builds kernels for the first one of each."""
    monkeypatch.setattr(stored_costs, "MAX_WARM_UP", 600.0)  # a busy machine would stop it
    compile_passes(monkeypatch, uses=100)
    monkeypatch.setattr(stored_costs, "builds_kernels", lambda: True)
    monkeypatch.setattr(mlx_redrafter.engine.engine, "step_costs", stored_costs.step_costs)
    monkeypatch.setattr(stored_costs, "time_steps", lambda *_: [_timed()])
    model = tiny_llama(VOCAB_SIZE)
    engine, plain = (
        Engine(model, wrapped_tokenizer(VOCAB_SIZE), one) for one in (random_drafter(64, 32), None)
    )
    engine._costs(engine.proposer)
    compiled = engine.target.compiled
    assert compiled.are_used
    used, passes, before = set(compiled._uses), set(compiled.passes), compiled._uses.total()
    assert {use[0] for use in used} == set(SIZES)
    for seed in range(4):
        options: dict[str, Any] = {"max_tokens": 30, "temp": seed % 2, "seed": seed}
        streams = (one.stream([seed + 1, 2, 3], **options) for one in (engine, plain))
        found, expected = ([response.token for response in stream] for stream in streams)
        assert found == expected
    assert compiled._uses.total() > before + 20
    assert set(compiled._uses) == used
    assert set(compiled.passes) == passes


KEYS = ("few", "many")


def _run(few: float, many: float, is_doubtful: bool = False) -> dict[str, float] | None:
    """Load the fastest times, or time them as given; None without new times."""
    timed: list[dict[str, float]] = []
    time_rounds = lambda: timed.append({"few": few, "many": many}) or timed  # noqa: E731
    rounds = load_or_time("what", [], KEYS, lambda _: is_doubtful, time_rounds)
    return fastest(rounds) if timed else None


@pytest.mark.parametrize("in_use", [False, True])
def test_doubt_costs_one_later_run_and_both_count(in_use):
    assert _run(1.0, 9.0, is_doubtful=not in_use) == {"few": 1.0, "many": 9.0}
    if in_use:
        assert _run(0.1, 0.1) is None
        doubt("what", [], KEYS)
    assert _run(5.0, 2.0, is_doubtful=True) == {"few": 1.0, "many": 2.0}
    assert _run(0.1, 0.1) is None
    assert load_or_time("what", [], KEYS, lambda _: True, list)[1] == {"few": 5.0, "many": 2.0}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert _run(1.0, 2.0) == {"few": 1.0, "many": 2.0}
            doubt("what", [], KEYS)
    assert "not kept" in caplog.text


FEW_KINDS = (PLAIN, VERIFY[2], READ)


def _rounds(seconds: Callable[[Kind, int, int], float | None], pause: float = 0.0) -> list[Seconds]:
    """Play a schedule on a machine whose steps cost ``seconds`` by kind, round and step of a turn.

    The policy chooses every step before it observes the previous one; ``pause`` is added to the
    clock per step.
    """
    now, count = 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_costs, "time", SimpleNamespace(perf_counter=lambda: now))
        schedule = stored_costs._Schedule(FEW_KINDS)
        plan = schedule.choose(None)
        while not schedule.is_done:
            following = schedule.choose(None)
            round_, place = divmod(count, stored_costs.STEPS * len(FEW_KINDS))
            kind, step = divmod(place, stored_costs.STEPS)
            assert plan == FEW_KINDS[kind].plan
            now += pause
            schedule.observe(Step(plan, 2, [1], seconds(FEW_KINDS[kind], round_, step)))
            plan, count = following, count + 1
    return schedule.rounds


def test_the_steps_inside_a_turn_count():
    """The first steps of a turn are warm-ups, and its ends partly measure the neighbours."""
    first = {kind: 1.0 + place for place, kind in enumerate(FEW_KINDS)}
    rounds = _rounds(lambda kind, _, step: first[kind] if step in (2, 3) else 99.0)
    assert rounds == [first] * stored_costs.ROUNDS
    # A step without a time leaves the others: stored times must be finite.
    rounds = _rounds(lambda kind, _, step: first[kind] if step == 3 else None)
    assert rounds == [first] * stored_costs.ROUNDS


def test_disturbed_rounds_are_followed_by_others_up_to_a_bound():
    rng = random.Random(3)

    def once(kind: Kind, number: int, _: int) -> float:
        return (5.0 if kind == VERIFY[2] and number == 0 else 1.0) * rng.uniform(0.99, 1.01)

    rounds = _rounds(once)
    assert len(rounds) == stored_costs.ROUNDS + 1
    assert not stored_costs.is_doubtful(rounds)
    assert max(stored_costs.fastest(rounds).values()) < 1.1
    rounds = _rounds(lambda kind, number, _: 2.0**-number)
    assert len(rounds) == stored_costs.MAX_ROUNDS
    assert stored_costs.is_doubtful(rounds)
    for share, expected in ((0.3, 3), (0.6, 1), (3.0, 1)):  # none begins that would end too late
        pause = share * stored_costs.PATIENCE / (stored_costs.STEPS * len(FEW_KINDS))
        assert len(_rounds(lambda kind, number, _: 2.0**-number, pause)) == expected


def test_a_step_that_costs_more_than_one_that_does_more_leaves_doubt():
    """So a single round of a large model, whose turns cannot differ, leaves doubt, too."""
    usual = {PLAIN: 1.0, VERIFY[2]: 2.0, VERIFY[8]: 2.1, READ: 2.3}
    assert not stored_costs.is_doubtful([usual])
    assert stored_costs.is_doubtful([usual | {VERIFY[2]: 3.0}])
    assert stored_costs.is_doubtful([usual | {PLAIN: 3.0}])


def test_drafts_that_would_be_right_leave_all_shapes_at_one_context(monkeypatch):
    model, _, drafter = load()
    target, caches, blank_cache = Target(model), list[TreeCache](), stored_costs.blank_cache
    remembered = lambda *given: caches.append(blank_cache(*given)) or caches[-1]  # noqa: E731
    monkeypatch.setattr(stored_costs, "blank_cache", remembered)
    monkeypatch.setattr(stored_costs, "MAX_ROUNDS", 1)
    stored_costs.time_steps(stored_costs.Setting(target, drafter, CONTEXT))
    steps = stored_costs.STEPS * len(stored_costs.kinds_of(drafter))
    assert caches[0].length <= 1.1 * (CONTEXT + steps)


def test_steps_after_a_long_context_are_timed_without_processing_it(monkeypatch):
    """And leave the model alone."""
    monkeypatch.setattr(stored_costs, "MAX_ROUNDS", 1)
    model, lengths, tokens = tiny_llama(), list[tuple[int, int]](), mx.array([[3, 1, 4, 1, 5]])
    before, target = model(tokens), Target(model)

    def note(model: Any, tokens: mx.array, *_: Any, cache: Any, **options: Any) -> None:
        lengths.append((tokens.shape[1], cache[0].offset))

    with monkeypatch.context() as patch:
        at_call(patch, type(model), "__call__", note)
        stored_costs.time_steps(stored_costs.Setting(target, random_drafter(64, 32), 4000))
    assert max(tokens for tokens, _ in lengths) == SIZES[-1]
    assert {offset >= 4000 for tokens, offset in lengths if tokens > 1} == {True}
    assert mx.array_equal(model(tokens), before)

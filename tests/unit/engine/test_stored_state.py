"""Estimates on disk: what the first text of a process begins with, and which files it ignores."""

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter import Lookup
from mlx_redrafter.engine import learned_state
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.learned_state import StateFile
from mlx_redrafter.measured import FOLDER
from mlx_redrafter.policy.plans import SIZES, TRUST, Guard
from mlx_redrafter.policy.state import PolicyState
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE, PROMPT = 64, list(range(3, 20))
OPTIONS = {"max_tokens": 16}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def _engine(model: nn.Module) -> Engine:
    """A new engine, as in another process."""
    return Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))


def _tokens(engine: Engine, **options: Any) -> list[int]:
    return [one.token for one in engine.stream(PROMPT, **OPTIONS, **options)]


def _file(folder: Path) -> Path:
    (path,) = folder.glob("*.state")
    return path


@cache
def _learned(weight: float = 2.0) -> PolicyState:
    """Estimates with something in each part; tests must not change them."""
    state = PolicyState(guard=Guard(0.02))
    for i in range(300):
        state.calibration.learn([(False, weight, 0.0), (True, 0.5, 1.0)], [(0, i % 4 > 0)])
        state.calibration.fit()
    state.drafts.mean = 2 * state.drafts.mean
    for _ in range(30):
        state.ratios.learn(8, 1.5)
    state.guard.learn_plain(0.03)
    state.guard.learn_drafted(100.0, 1.0)
    state.budget.save(0.5, 1.0)
    state.evenness.learn(True, 8.0, 16.0)
    return state


def _through_json(state: PolicyState) -> PolicyState:
    return PolicyState.restored(json.loads(json.dumps(state.stored())))


def test_the_first_text_of_a_process_begins_with_the_estimates_of_the_one_before(model, folder):
    first = _engine(model)
    text = _tokens(first)
    known: Any = first.memory.policy
    second = _engine(model)
    assert second.memory.policy is None, "read when a text needs it"
    stream = second.stream(PROMPT, **OPTIONS)
    found: Any = second.memory.policy
    assert found.calibration.weights == pytest.approx(known.calibration.weights)
    assert found.drafts.mean == pytest.approx(known.drafts.mean, abs=1e-4)
    assert [one.token for one in stream] == text
    assert _file(folder).stat().st_size < 20_000


def test_old_evidence_weighs_less():
    state = _learned()
    once = _through_json(state)
    often = once
    for _ in range(20):
        often = _through_json(often)
    features, parents = [(False, 2.0, 0.0)], [0]
    (known,) = state.calibration.probabilities(features, parents)
    assert once.calibration.probabilities(features, parents) == pytest.approx([known])
    needed = []
    for begin in (state, once, often):
        calibration, seen = begin.for_next().calibration, 0
        while calibration.probabilities(features, parents)[0] > 0.4:
            calibration.learn(features, [(0, False)])
            calibration.fit()
            seen += 1
        needed.append(seen)
    assert needed[0] > needed[1] > needed[2]
    # A restored calibration is as sure as a quarter of a window.
    traces = [np.trace(one.calibration.stored()["evidence"]) for one in (state, once)]
    assert traces[1] == pytest.approx(traces[0] / 2)
    assert 0.5 * np.log(1.5) < np.log(once.ratios.of(8)) <= np.log(1.5)
    assert once.evenness.shares == pytest.approx(state.evenness.shares)
    assert state.evenness.shares[0] == 1.0 > state.evenness.shares[1]


def test_some_trust_is_left_whatever_was_lost():
    state: Any = _learned()
    assert not state.guard.allows_drafts
    found: Any = _through_json(state).guard
    assert found.plain == pytest.approx(0.01)  # half of the timed one, and a measured one
    assert found.allows_drafts
    found.learn_drafted((TRUST / 2 + 1) * found.plain, 0.5)
    assert not found.allows_drafts


def test_other_weights_drafters_and_machines_have_estimates_of_their_own(
    model, folder, monkeypatch
):
    _tokens(_engine(model))
    for other in (tiny_llama(seed=6, vocab_size=VOCAB_SIZE), model):
        if other is model:
            monkeypatch.setattr("platform.processor", lambda: "another one")
        engine = _engine(other)
        engine.stream(PROMPT, **OPTIONS)
        assert engine.memory.policy is None

    class Other(Lookup):
        """Another kind without networks."""

    for drafter in ("lookup", Other()):
        _tokens(Engine(model, wrapped_tokenizer(VOCAB_SIZE), drafter))
    assert len(list(folder.glob("*.state"))) == 3


def _changed(*path: Any, value: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        stored = json.loads(content)
        reduce(getitem, path[:-1], stored)[path[-1]] = value
        return json.dumps(stored).encode()

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "random": lambda content: np.random.default_rng(0).bytes(500),
    "nested": lambda content: b"[" * 100_000,
    "large": lambda content: content + b" " * learned_state.MOST_BYTES,
    "nan": _changed("policy", "calibration", "weights", 2, value=float("nan")),
    "another shape": _changed("policy", "drafts", "mean", value=[1.0]),
    "a word": _changed("policy", "calibration", "evidence", value="much"),
    "negative": _changed("policy", "calibration", "evidence", value=(-np.eye(6)).tolist()),
    "no plain steps": _changed("policy", "guard", "plain", value=[]),
    "a size": _changed("policy", "ratios", value={"7": [0.0, 0.1]}),
    "a batch": _changed("batches", value={"many": None}),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_ignored_without_a_word(model, folder, kind, caplog):
    caplog.set_level(logging.DEBUG)
    StateFile(_engine(model).networks).count_text(_learned(), {4: _learned()})
    path = _file(folder)
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    engine = _engine(model)
    engine.stream(PROMPT, **OPTIONS)
    assert (engine.memory.policy, engine.memory.batches) == (None, {})
    assert "estimates" not in caplog.text
    _tokens(engine)
    assert StateFile(engine.networks).read()[0] is not None, "replaced"


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), temp=st.sampled_from([0.0, 0.8]))
def test_no_file_changes_a_text(temp, seed):
    model, rng = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), np.random.default_rng(seed)
    state = _through_json(_learned(rng.choice([-1.0, 0.5, 2.0])))
    state.drafts.mean = rng.uniform(0.0, 9.0, state.drafts.mean.shape)
    state.drafts.chosen = rng.uniform(0.1, 9.0, state.drafts.chosen.shape)
    for size in SIZES:
        state.ratios.learn(size, float(rng.uniform(0.1, 10.0)))
    engine = _engine(model)
    StateFile(engine.networks).count_text(state, {})
    plain = Engine(model, wrapped_tokenizer(VOCAB_SIZE), None)
    sampling = {"temp": temp, "seed": 3}
    assert _tokens(engine, **sampling) == _tokens(plain, **sampling)
    assert engine.memory.file is not None


def test_processes_that_write_at_once_leave_a_whole_file(model):
    networks = _engine(model).networks
    files, state = [StateFile(networks) for _ in range(8)], _learned()

    def write(i: int) -> None:
        for _ in range(20):
            files[i].count_text(state, {i: state})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    policy, batches = StateFile(networks).read()
    assert policy is not None
    assert len(batches) == 1
    assert all(one.guard is None for one in batches.values()), "plain steps are timed again"


def test_a_disk_that_takes_nothing_is_no_warning(model, folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    (folder / "file").touch()
    monkeypatch.setenv(FOLDER, str(folder / "file" / "inside"))
    engine = _engine(model)
    assert len(_tokens(engine)) == OPTIONS["max_tokens"]
    (found,) = [one for one in caplog.records if "estimates" in one.message]
    assert found.levelno == logging.INFO


def test_nothing_is_stored_if_that_is_switched_off(model, folder, monkeypatch):
    monkeypatch.setenv(FOLDER, "0")
    monkeypatch.chdir(folder)
    _tokens(_engine(model))
    assert os.listdir(folder) == []
    engine = _engine(model)
    engine.stream(PROMPT, **OPTIONS)
    assert engine.memory.policy is None
    # Uncoupled drafts say nothing of coupled ones.
    monkeypatch.setenv(FOLDER, str(folder))
    _tokens(_engine(model), temp=0.5, couple=False)
    assert os.listdir(folder) == []


def test_batches_begin_with_the_estimates_of_the_process_before(model):
    first = _engine(model)
    list(first.stream_batch([PROMPT, PROMPT[2:]], batch_size=2, **OPTIONS))
    assert 2 in first.memory.batches
    second = _engine(model)
    second.share()
    assert 2 in second.memory.batches

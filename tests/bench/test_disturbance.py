"""Disturbed measurements are told from quiet ones, and what is seen is said."""

import math

import pytest

from mlx_redrafter.bench import recording
from mlx_redrafter.bench.recording import LoadWatch, find_disturbances
from mlx_redrafter.bench.runs import PLAIN, STOCK, TimedRun


def make_runs(stock, plain=None):
    """Repeats of one text of 11 tokens, by their seconds."""
    return [
        TimedRun("", 0, arm, "p", "c", repeat, 5, 0.5, seconds, list(range(11)), [], 0, 0)
        for arm, times in ((STOCK, stock), (PLAIN, plain or stock))
        for repeat, seconds in enumerate(times)
    ]


def watch_for(monkeypatch, seconds, cpu, before, after):
    """What a watch finds after so many seconds, in which this process took ``cpu``."""
    now = {"perf_counter": 0.0, "process_time": 0.0}
    for name in now:
        monkeypatch.setattr(recording.time, name, lambda name=name: now[name])
    monkeypatch.setattr(recording, "load_averages", lambda: before)
    watch = LoadWatch()
    now |= {"perf_counter": seconds, "process_time": cpu}
    monkeypatch.setattr(recording, "load_averages", lambda: after)
    return watch.others()


@pytest.mark.parametrize("others", [0.0, 1.5])
def test_the_load_of_others_is_what_this_process_and_the_past_leave(monkeypatch, others):
    kept = math.exp(-30 / 60)
    load = 4.0 * kept + (2.0 + others) * (1 - kept)
    found = watch_for(monkeypatch, 30, 60, [4.0, 0, 0], [load, 0, 0])
    assert found == pytest.approx(others, abs=1e-9)


@pytest.mark.parametrize(("seconds", "after"), [(5, [9.0, 0, 0]), (100, [])])
def test_a_load_that_is_not_known_is_none(monkeypatch, seconds, after):
    assert watch_for(monkeypatch, seconds, 0, [1.0, 0, 0], after) is None


def test_quiet_measurements_have_no_warning():
    assert find_disturbances(0.2, make_runs([1.0, 1.02, 1.01])) == []
    assert find_disturbances(None, make_runs([1.0], plain=[1.04])) == []
    assert find_disturbances(None) == []


def test_every_sign_is_a_sentence_with_its_number():
    load, plain, spread = find_disturbances(2.3, make_runs([1.0, 2.0], plain=[2.0, 4.0]))
    assert "other programs kept 2.3 threads busy" in load
    assert "plain decoding was 0.50 times as fast as mlx-lm" in plain
    assert "by mlx-lm lie 33% apart" in spread
    assert all("stop other programs" in line and "\n" not in line for line in (load, plain, spread))

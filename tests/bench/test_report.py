"""Rows from runs: ratios are taken within a turn, texts against the reference.

At the end, disturbed measurements, which are told from quiet ones.
"""

import math

import pytest

from mlx_redrafter.bench import recording
from mlx_redrafter.bench.recording import LoadWatch, find_disturbances
from mlx_redrafter.bench.report import summarise, tabulate
from mlx_redrafter.bench.runs import PLAIN, STOCK, TimedRun
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.cli.bench_output import show_lines


def make_run(arm, seconds, tokens=(1, 2, 3), accepted=(), prompt="p", repeat=0, block=0):
    return TimedRun(
        "g", block, arm, prompt, "c", repeat, 5, 0.5, seconds, list(tokens), list(accepted), 6
    )


def test_ratios_within_a_turn():
    runs = [
        make_run(STOCK, 4.0),
        make_run("a", 2.0, accepted=[0, 1]),
        make_run(STOCK, 8.0, repeat=1),
        make_run("a", 2.0, accepted=[1, 0, 1], repeat=1),
        make_run(STOCK, 40.0, block=1),
        make_run("b", 4.0, tokens=(1, 2, 9), accepted=[2], block=1),
    ]
    stock, a, b = summarise(runs)
    assert (stock.arm, stock.speedup.median, stock.tokens_per_step) == (STOCK, 1, None)
    assert a.speedup.median == 3
    assert a.tokens_per_step == pytest.approx(4 / 3)
    assert a.acceptance_rate_by_depth == pytest.approx([2 / 3, 1 / 3])
    assert a.nodes_per_step == 4
    assert (a.num_different, b.num_different) == (0, 1)
    assert b.speedup.median == 10


def test_a_table_leaves_out_columns_without_values():
    columns, *lines = tabulate(summarise([make_run(STOCK, 4.0), make_run("a", 2.0, accepted=[2])]))
    assert not {"setting", "category", "acceptance by position"} & set(columns)
    cells = [dict(zip(columns, line, strict=True)) for line in lines]
    assert [(one["method"], one["times mlx-lm"]) for one in cells] == [
        (STOCK, "1.00"), ("a", "2.00"),
    ]  # fmt: skip
    assert [one["nodes/step"] for one in cells] == ["", "3.0"]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_table_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = summarise([make_run(STOCK, 4.0), make_run("4x5x9", 2.0, accepted=[2])])
    show_lines(tabulate(rows), "all prompts")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    names, _, drafted = tabulate(rows)
    for name, cell in zip(names, drafted, strict=True):
        assert f"{name}: {cell}" in text or (not cell and f"{name}: " not in text)


def test_noise_of_stock_is_not_ours():
    runs = [make_run(STOCK, 1.0, (7, 8)), make_run(PLAIN, 1.0), make_run("a", 1.0, (1, 2))]
    assert [row.num_different for row in summarise(runs, 1.0)] == [None, 0, 1]


def test_texts_of_one_token_have_no_speed():
    runs = [make_run(STOCK, 0.0, (1,)), make_run("a", 0.0, (1,))]
    row = summarise(runs)[1]
    assert row.speedup is None
    assert row.tokens_per_second is None
    assert row.num_different == 0


def test_texts_that_repeat_themselves_do_not_count_but_are_compared():
    fresh, stale = (1, 2, 3, 4, 5, 6, 7, 8), (1,) * 8
    runs = [
        make_run(STOCK, 4.0, fresh),
        make_run("a", 2.0, fresh, accepted=[0, 1]),
        make_run(STOCK, 4.0, stale, prompt="q"),
        make_run("a", 1.0, (*stale[:-1], 2), accepted=[0, 0, 9], prompt="q"),
    ]
    row = summarise(runs, max_repeated=0.2)[1]
    assert row.speedup.median == 2
    assert row.acceptance_rate_by_depth == [1.0]
    assert (row.num_texts, row.num_different) == (1, 1)
    none = summarise(runs[2:], max_repeated=0.2)[1]
    assert (none.speedup, none.tokens_per_step, none.num_texts) == (None, None, 0)


@pytest.mark.parametrize(
    ("samples", "low", "high", "span"),
    [
        ([3.0], 3, 3, ""),
        ([3.0, 1.0, 2.0, 5.0], 1, 5, "1.00 to 5.00 (range of 4)"),
        ([3.0, 1.0, 2.0, 5.0, 4.0], 1, 5, "(95%)"),
    ],
)
def test_few_samples_have_a_range_and_more_an_interval(samples, low, high, span):
    found = estimate(samples)
    assert found.count == len(samples)
    assert low <= found.low <= found.median <= found.high <= high
    assert found.span().endswith(span)
    if len(samples) == 5:
        assert (found.median, found.quartiles) == (3, (2, 4))
    else:
        assert (found.low, found.high, found.span()) == (low, high, span)


def test_repeats_of_a_text_are_no_further_texts():
    """Repeats differ by noise alone, so the interval is that of the texts."""
    speeds = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    once = estimate(speeds)
    repeated = estimate(3 * speeds, 3 * list("abcdef"))
    assert (repeated.median, repeated.count, repeated.num_texts) == (3.5, 18, 6)
    assert (repeated.low, repeated.high) == (once.low, once.high)
    unequal = estimate([*speeds, 6.0], list("abcdeff"))
    assert once.low <= unequal.low < unequal.high <= 6
    few = estimate([1.0, 1.1, 2.0, 2.1, 3.0, 3.1], list("aabbcc"))
    assert few.span() == "1.00 to 3.10 (range of 6)"


def test_rows_count_a_prompt_once_in_their_intervals():
    runs = [
        make_run(arm, speed * seconds, prompt=prompt, repeat=repeat)
        for prompt, speed in zip("abcdef", range(1, 7), strict=True)
        for repeat in range(4)
        for arm, seconds in ((STOCK, 2.0), ("a", 1.0 / speed))
    ]
    row = summarise(runs)[1]
    for found in (row.speedup, row.tokens_per_second, row.prompt_speedup):
        assert (found.count, found.num_texts) == (24, 6)


# Disturbed measurements


def make_runs(stock, plain=None):
    """Repeats of one text of 11 tokens, by their seconds."""
    return [
        make_run(arm, seconds, range(11), repeat=repeat)
        for arm, times in ((STOCK, stock), (PLAIN, plain or stock))
        for repeat, seconds in enumerate(times)
    ]


def watch_for(monkeypatch, seconds, cpu, before, after):
    """Return the finding of a watch after so many seconds, of which this process took ``cpu``."""
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

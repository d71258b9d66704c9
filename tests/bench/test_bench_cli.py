"""The commands of `redrafter-mlx bench` and of the laboratory, end to end on a tiny pair."""

import json
import sys

import pytest

from mlx_redrafter.cli.bench_output import (
    parse_count,
    parse_ints,
    parse_names,
    parse_shapes,
    parse_temps,
)
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from tests.bench.commands import run, run_lab
from tests.helpers.models import shared_path

pytestmark = pytest.mark.usefixtures("no_timing")


@pytest.mark.parametrize(("temp", "beam"), [(0, "top_n w4 l5 n9"), (0.9, "beam w4 l5")])
def test_compare(folders, prompts, tmp_path, temp, beam):
    out = tmp_path / "c.json"
    options = ["--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 4]
    options += ["--temp", temp, "--repeats", 1 if temp else 2, "-o", out]
    options += [] if temp else ["--stock-draft-model", folders[0]]
    text = run("compare", *options)
    assert beam in text
    result = json.loads(out.read_text())
    assert all(line in text for line in result["disturbances"])
    # A sampled text of stock mlx-lm has another random state.
    rows = {row["arm"]: row["num_different"] for row in result["rows"]}
    assert rows["auto"] == rows[beam] == 0
    assert temp or set(rows.values()) == {0}
    assert temp or len(result["runs"]) == 6 * 2 * 2
    run("compare", *options, "--resume")
    assert len(json.loads(out.read_text())["runs"]) == len(result["runs"])


@pytest.mark.parametrize("command", ["speed", "compare", "sweep", "throughput"])
def test_a_prompt_that_is_too_long_is_named(folders, tmp_path, command):
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc\n\n" + "abc " * 2000)
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts)
    with pytest.raises(ConfigError, match=r"prompt 2 of .*p\.txt: the prompt has \d+ tokens, the "):
        run(command, *options, "--out", tmp_path / "out")


def test_sweep(folders, tmp_path, monkeypatch):
    target, drafter = folders
    prompts, out = tmp_path / "p.jsonl", tmp_path / "sweep"
    prompts.write_text('{"turns": ["abc"], "category": "x", "question_id": 3}\n')
    options = (
        "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 4, "-o", out,
        "--widths", "1-2", "--lengths", "2-3", "--repeats", 1, "--temps", "0,0.8",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install '.[plot]'" in run("sweep", *options)
    result = json.loads((out / "sweep.json").read_text())
    assert len(result["points"]) == 2 * 8
    assert {point["row"]["num_different"] for point in result["points"]} == {0}
    pytest.importorskip("matplotlib")
    run("sweep", *options, "--resume")
    assert len(list(out.glob("*.png"))) == 2 * 2


def test_lists_and_counts():
    assert [parse_count(text) for text in ("12", "0.2B", "5 K")] == [12, 2 * 10**8, 5000]
    assert parse_ints("1,2, 4-6,5") == (1, 2, 4, 5, 6)
    assert parse_temps("0,0.7,0.70,0") == (0, 0.7)
    beam = DraftPlan.of(4, 5, select="beam")
    expected = [DraftPlan.of(1, 5), DraftPlan.of(4, 5, 9), beam]
    assert parse_shapes("1x5, 4x5x9,beam:4x5,4x5") == expected
    assert parse_names("a, b,a", ("a", "b")) == ("a", "b")
    for parse, texts, message in (
        (parse_count, ("", "-1", "2G", "1.2.3M", "0"), "expected a number"),
        (parse_ints, ("", "0", "3-2", "a", "1,,2"), "expected numbers"),
        (parse_ints, ("1-99999999", "1-600,601-1200"), "at most 1000 numbers"),
        (parse_shapes, ("", "4", "4x5x9x2", "tree:4x5"), "expected draft shapes"),
        (lambda text: parse_names(text, ("a", "b")), ("c",), "some of a, b, got 'c'"),
    ):
        for text in texts:
            with pytest.raises(ConfigError, match=message):
                parse(text)


def test_validation_of_the_prediction():
    sweeps = shared_path("data/apple_sweeps")
    assert "median error of step time" in run_lab("validate", sweeps)

"""The commands of `redrafter-mlx bench` and of the laboratory, end to end on a tiny pair."""

import json
import sys

import pytest

from mlx_redrafter.cli.bench_output import parse_count, parse_ints, parse_names, parse_shapes
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from tests.bench.commands import PROMPTS, run, run_lab
from tests.helpers.models import shared_path


def test_counts():
    assert [parse_count(text) for text in ("12", "0.2B", "3m", "5 K")] == [
        12,
        2 * 10**8,
        3 * 10**6,
        5000,
    ]
    for text in ("", "-1", "2G", "1.2.3M", "0"):
        with pytest.raises(ConfigError, match="expected a number"):
            parse_count(text)


def test_compare(folders, tmp_path):
    target, drafter = folders
    prompts = tmp_path / "p.txt"
    prompts.write_text(PROMPTS)
    out = tmp_path / "c.json"
    options = ("--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 6, "-o", out)
    text = run("compare", *options, "--repeats", 2, "--stock-draft-model", target)
    assert "top_n w4 l5 n9" in text
    result = json.loads(out.read_text())
    assert len(result["runs"]) == 6 * 2 * 2
    assert {row["num_different"] for row in result["rows"]} == {0}
    assert all(line in text for line in result["disturbances"])
    run("compare", *options, "--repeats", 2, "--stock-draft-model", target, "--resume")
    assert len(json.loads(out.read_text())["runs"]) == 6 * 2 * 2


@pytest.mark.parametrize("command", ["speed", "compare", "sweep", "throughput"])
def test_a_prompt_that_is_too_long_is_named(folders, tmp_path, command):
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc\n\n" + "abc " * 2000)
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts)
    with pytest.raises(ConfigError, match=r"prompt 2 of .*p\.txt: the prompt has \d+ tokens, the "):
        run(command, *options, "--out", tmp_path / "out")


def test_compare_at_a_temperature(folders, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text(PROMPTS)
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 6)
    out = tmp_path / "c.json"
    text = run("compare", *options, "--repeats", 1, "--temp", 0.9, "-o", out)
    assert "beam w4 l5" in text
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["auto"]["num_different"] == rows["beam w4 l5"]["num_different"] == 0


def test_sweep(folders, tmp_path):
    target, drafter = folders
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["abc"], "category": "x", "question_id": 3}\n')
    out = tmp_path / "sweep"
    options = (
        "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 5, "-o", out,
        "--widths", "1-2", "--lengths", "2-3", "--repeats", 1, "--temps", "0,0.8",
    )  # fmt: skip
    run("sweep", *options)
    result = json.loads((out / "sweep.json").read_text())
    assert len(result["points"]) == 2 * 8
    assert {point["row"]["num_different"] for point in result["points"]} == {0}
    pytest.importorskip("matplotlib")
    assert len(list(out.glob("*.png"))) == 2 * 2


def test_sweep_without_matplotlib(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc")
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 3)
    out = tmp_path / "sweep"
    text = run("sweep", *options, "-o", out, "--widths", 1, "--lengths", 2, "--repeats", 1)
    assert "pip install '.[plot]'" in text
    assert (out / "sweep.json").exists()


def test_lists():
    assert parse_ints("1,2, 4-6,5") == (1, 2, 4, 5, 6)
    for text in ("", "0", "3-2", "a", "1,,2"):
        with pytest.raises(ConfigError, match="expected numbers"):
            parse_ints(text)
    for text in ("1-99999999", "1-600,601-1200"):
        with pytest.raises(ConfigError, match="at most 1000 numbers"):
            parse_ints(text)
    assert parse_shapes("1x5, 4x5x9,beam:4x5,4x5") == [
        DraftPlan.of(1, 5), DraftPlan.of(4, 5, 9), DraftPlan.of(4, 5, select="beam"),
    ]  # fmt: skip
    for text in ("", "4", "4x5x9x2", "tree:4x5"):
        with pytest.raises(ConfigError, match="expected draft shapes"):
            parse_shapes(text)
    assert parse_names("a, b,a", ("a", "b")) == ("a", "b")
    with pytest.raises(ConfigError, match="expected some of a, b, got 'c'"):
        parse_names("c", ("a", "b"))


def test_validation_of_the_prediction():
    sweeps = shared_path("data/apple_sweeps")
    assert "median error of step time" in run_lab("validate", sweeps)

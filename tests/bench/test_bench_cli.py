"""The commands of `redrafter-mlx bench`, end to end on a tiny pair."""

import json
import sys

import pytest
from typer.testing import CliRunner

from mlx_redrafter.cli.bench import app
from mlx_redrafter.cli.bench_output import parse_count, parse_ints, parse_names
from mlx_redrafter.errors import ConfigError
from tests.helpers.models import shared_path

runner = CliRunner()


def run(*arguments) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 1), result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_widen_and_overhead(folders, tmp_path):
    target, drafter = folders
    wide, wide_drafter = tmp_path / "wide", tmp_path / "wide-drafter"
    options = ("--drafter", drafter, "--drafter-out", wide_drafter, "--context", 99)
    run("widen", target, wide, "--parameters", "3M", *options)
    assert json.loads((wide / "config.json").read_text())["max_position_embeddings"] == 99
    out = tmp_path / "o.json"
    shape = ("--beam-width", 2, "--beam-length", 3)
    text = run(
        "overhead",
        "--model",
        wide,
        "--drafter",
        wide_drafter,
        *shape,
        "--rounds",
        3,
        "-o",
        out,
        "--prompt",
        "abc",
    )
    assert "verify(9)/verify(1)" in text
    result = json.loads(out.read_text())
    assert len(result["found"]["samples"]["step"]) == 3
    assert result["configuration"]["model"] == "wide"


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


def test_usage_errors(folders):
    with pytest.raises(ConfigError, match="belong together"):
        run("widen", folders[0], "x", "--drafter", "y")
    with pytest.raises(ConfigError, match="no drafter"):
        run("overhead", "--model", folders[0])


PROMPTS = "abc abc\n\nhello there\n"


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
    assert {row["num_different"] for row in result["found"]["rows"]} == {0}
    assert all(line in text for line in result["disturbances"])
    run("compare", *options, "--repeats", 2, "--stock-draft-model", target, "--resume")
    assert len(json.loads(out.read_text())["runs"]) == 6 * 2 * 2


def test_compare_at_a_temperature(folders, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text(PROMPTS)
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 6)
    out = tmp_path / "c.json"
    text = run("compare", *options, "--repeats", 1, "--temp", 0.9, "--seed", 4, "-o", out)
    assert "beam w4 l5" in text
    rows = {row["arm"]: row for row in json.loads(out.read_text())["found"]["rows"]}
    assert rows["auto"]["num_different"] == rows["auto, uncoupled"]["num_different"] == 0


def test_sweep(folders, tmp_path):
    target, drafter = folders
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["abc"], "category": "x", "question_id": 3}\n')
    out = tmp_path / "sweep"
    options = (
        "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 5, "-o", out,
        "--widths", "1-2", "--lengths", "2-3", "--repeats", 1, "--temps", "0,0.8",
        "--shapes-per-block", 3,
    )  # fmt: skip
    run("sweep", *options)
    result = json.loads((out / "sweep.json").read_text())
    assert len(result["points"]) == 2 * 8
    assert {point["row"]["num_different"] for point in result["points"]} == {0}
    rows = (out / "recurrent_drafting.csv").read_text().splitlines()
    apple = (
        "run,beam_width,beam_length,dtype,nmax_length,greedy,steps,prompt_length,"
        "prompt_and_generated_length,comprehension_and_generation_time"
    )
    assert rows[0].startswith(apple)
    assert rows[1].startswith("0,1,2,mlx.core.float32,5,True,")
    assert len(rows) == 1 + 2 * 8
    assert len((out / "autoregression.csv").read_text().splitlines()) == 1 + 2 * 3
    pytest.importorskip("matplotlib")
    assert len(list(out.glob("*.png"))) == 2 * 2 + 1


def test_sweep_without_the_noise_of_the_target(folders, tmp_path):
    target, drafter = folders
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc")
    options = (
        "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 40, "--widths", 4,
        "--lengths", 4, "--selections", "top_n", "--repeats", 1, "--temps", "0,2",
    )  # fmt: skip
    run("sweep", *options, "-o", tmp_path / "with")
    run("sweep", *options, "--no-couple", "-o", tmp_path / "without")
    results = [json.loads((tmp_path / n / "sweep.json").read_text()) for n in ("with", "without")]
    assert [result["configuration"]["couple"] for result in results] == [True, False]
    greedy, noisy = zip(*(result["points"] for result in results), strict=True)
    assert greedy[0]["row"]["tokens_per_step"] == greedy[1]["row"]["tokens_per_step"]
    assert noisy[0]["row"]["tokens_per_step"] != noisy[1]["row"]["tokens_per_step"]
    assert noisy[0]["row"]["num_different"] == noisy[1]["row"]["num_different"] == 0


def test_sweep_without_matplotlib(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc")
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 3)
    out = tmp_path / "sweep"
    text = run("sweep", *options, "-o", out, "--widths", 1, "--lengths", 2, "--repeats", 1)
    assert "install mlx-redrafter[plot]" in text
    assert (out / "recurrent_drafting.csv").exists()


def test_profile(folders, tmp_path):
    options = ("--model", folders[0], "--drafter", folders[1], "-o", tmp_path / "profile")
    text = run("profile", *options, "--contexts", "16,40", "--tokens", "1,3", "--widths", 2,
               "--rounds", 2, "--beam-length", 3)  # fmt: skip
    assert "verify(T) at 40" in text
    found = json.loads((tmp_path / "profile" / "profile.json").read_text())["found"]
    assert [(cost["context"], cost["tokens"]) for cost in found["verify"]] == [
        (16, 1), (16, 3), (40, 1), (40, 3)
    ]  # fmt: skip
    assert [cost["length"] for cost in found["draft"]] == [2, 3]


def test_lists():
    assert parse_ints("1,2, 4-6,5") == (1, 2, 4, 5, 6)
    for text in ("", "0", "3-2", "a", "1,,2"):
        with pytest.raises(ConfigError, match="expected numbers"):
            parse_ints(text)
    assert parse_names("a, b,a", ("a", "b")) == ("a", "b")
    with pytest.raises(ConfigError, match="expected some of a, b, got 'c'"):
        parse_names("c", ("a", "b"))


def test_predict_says_what_it_is(tmp_path):
    out = tmp_path / "p.json"
    text = run("predict", "--chip", "m1 max", "-o", out)
    assert "PREDICTION, not a measurement" in text
    assert "w1 l5" in text
    assert "default" in text
    assert "The best shape is predicted to be" in " ".join(text.split())
    assert "PREDICTION" in json.loads(out.read_text())["notes"][0]
    with pytest.raises(ConfigError, match="no chip given"):
        run("predict")


def test_validation_of_the_prediction():
    sweeps = shared_path("data/apple_sweeps")
    assert "median error of step time" in run("predict", "--validate", sweeps)

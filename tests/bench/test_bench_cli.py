"""The commands of `redrafter-mlx bench`, end to end on a tiny pair."""

import json

import pytest
from typer.testing import CliRunner

from mlx_redrafter.cli.bench import app, parse_count
from mlx_redrafter.errors import ConfigError

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
    assert "verify(7)/verify(1)" in text
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

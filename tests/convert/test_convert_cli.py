"""`redrafter-mlx convert SRC DST` and `convert SRC`, as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_redrafter.cli.main import main
from tests.convert import handmade

WIDE = {**handmade.CONFIG, "hidden_size": 64, "exit_dim": 128, "vocab_size": 96}


@pytest.fixture
def source(tmp_path: Path) -> str:
    handmade.write_checkpoint(tmp_path / "source", "zip", WIDE)
    return str(tmp_path / "source")


def test_convert(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", "-q", "--q-bits", "8", source, out, "--dtype", "bfloat16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {out}: hidden_size 64")
    assert "8 bits, groups of 64" in captured.out
    assert captured.err == ""
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["quantization"]["bits"] == 8
    back = str(tmp_path / "back")
    assert main(["convert", source, str(tmp_path / "mlx")]) == 0
    assert main(["convert", str(tmp_path / "mlx"), back, "--to", "pytorch"]) == 0
    assert "Apple's PyTorch code" in capsys.readouterr().out
    assert main(["convert", back]) == 0


def test_inspect(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", source]) == 0
    shown = capsys.readouterr().out
    assert "a recurrent drafter with apple names" in shown
    assert "hidden_size: 64" in shown
    assert re.search(r"rnn_w\.weight +float32 +\[64, 64\]", shown)


def test_a_bad_source_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handmade.write_checkpoint(tmp_path / "source", "safetensors", {**WIDE, "exit_dim": 100})
    handmade.write_config(tmp_path / "source", WIDE)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "has shape [100, 100], expected [128, 128]" in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SRC'"),
        (["a", "-q"], "options need a folder to write; add DST"),
        (["a", "b", "--dtype", "int8"], "--dtype"),
        (["a", "b", "--vocab-slice", "5"], "need each other"),
        (["a", "b", "--vocab-slice", "5", "--vocab-text", "t"], "needs --target"),
        (["a", "b", "--to", "pytorch", "-q"], "no option but --dtype"),
        (["a", "b", "-q", "--q-bits", "5"], "must be one of"),
    ],
)
def test_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_loads_little_and_names_both_uses() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mlx_redrafter", "convert", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "convert SRC` describes a checkpoint" in " ".join(shown.stdout.split())
    assert "mlx_lm" not in shown.stderr
    assert "torch" not in shown.stderr

"""`bench/lab/pair/draft_model.py`: a draft model from the cache of a drafter's training."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import Cli
from tests.helpers.models import shared_model
from tests.training.conftest import Run

SCRIPT = Path(__file__).parents[2] / "bench" / "lab" / "pair" / "draft_model.py"


def test_it_drafts_for_the_target(
    finished: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = shared_model("stories260k"), tmp_path / "draft-model"
    arguments = ["--target", model, "--cache", finished.request.cache_folder, "--out", out]
    sizes = ["--hidden", 32, "--layers", 1, "--lr", 0.01]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, [*arguments, *sizes])])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    losses = [float(line.split()[5].strip(",")) for line in capsys.readouterr().out.splitlines()]
    assert losses
    prompt = ("--model", model, "--prompt", "Once upon", "--max-tokens", 40, "--json")
    plain = cli("generate", *prompt, "--drafter", "none")
    drafted = cli("generate", *prompt, "--draft-model", out, "--beam-width", 1)
    assert drafted.code == 0
    assert json.loads(drafted.out)["tokens"] == json.loads(plain.out)["tokens"]
    assert json.loads(drafted.out)["tokens_per_step"] > 1.02

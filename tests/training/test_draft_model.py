"""`bench/lab/pair/draft_model.py`: a draft model from the cache of a drafter's training."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import Cli
from tests.helpers.models import shared_model
from tests.training.conftest import Run, check_drafts

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
    values = check_drafts(cli, model, out, "Once upon", "--max-tokens", 40, "--beam-width", 1)
    assert values["tokens_per_step"] > 1.02

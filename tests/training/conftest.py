"""A drafter trained for stories260k, once for all tests of a session."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.target.target import Target
from mlx_redrafter.training import (
    DataOptions,
    TrainingOptions,
    TrainingRequest,
    TrainingResult,
    train_drafter,
)
from tests.helpers.cli import Cli
from tests.helpers.models import shared_path, tiny_llama
from tests.training.pieces import Silent

SEPARATOR = "<|endoftext|>"


@pytest.fixture(scope="session")
def stories_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some stories to train on; skips where there are none."""
    source = shared_path("text/tinystories-train.txt")
    stories = source.read_text(encoding="utf-8").split(SEPARATOR)[:120]
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(SEPARATOR.join(stories).replace(SEPARATOR, f"\n{SEPARATOR}\n"))
    return path


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of 12 tokens."""
    return Target(tiny_llama(vocab_size=12))


def small_request(stories: Path, out: Path) -> TrainingRequest:
    """Request a run of some seconds."""
    return TrainingRequest(
        model=str(shared_path("models/stories260k")),
        out=out,
        data=[stories],
        data_options=DataOptions(tokens=8000, answer_tokens=64, held_out=8),
        training=TrainingOptions(epochs=3, batch_tokens=256, num_evaluations=3),
    )


class Run:
    def __init__(self, request: TrainingRequest):
        self.request = request
        self.reporter = Silent()
        self.result: TrainingResult = train_drafter(request, self.reporter)


@pytest.fixture(scope="session")
def finished(stories_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a drafter for stories260k that drafts some tokens right."""
    return Run(small_request(stories_file, tmp_path_factory.mktemp("run") / "drafter"))


def check_drafts(run: Cli, model: Path, drafter: Path, prompt: str, *more: object) -> Any:
    """Check that a drafted text is the plain one; return what `generate` says of it."""
    options = ("--model", model, "--prompt", prompt, "--json", "--beam-width", 2, *more)
    plain, drafted = (run("generate", *options, "--drafter", one) for one in ("none", drafter))
    assert drafted.code == 0, drafted.err
    values = json.loads(drafted.out)
    assert values["tokens"] == json.loads(plain.out)["tokens"]
    return values


def curve_of(folder: Path) -> list[float]:
    """Read the tokens per step of every measurement from the card of a drafter."""
    curve = (folder / "README.md").read_text().partition("## Training curve")[2]
    return [float(rate) for rate in re.findall(r"\| ([\d.]+) \|$", curve, re.MULTILINE)]

"""Fixtures that several tests share. Models are loaded once; tests must not change them."""

import gc
import os

# Nothing is downloaded, and the command line sees the same.
os.environ["HF_HUB_OFFLINE"] = "1"

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx_redrafter  # noqa: F401  before MLX, for its faster BLAS

# isort: split
import hypothesis
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter import load
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter
from tests.helpers.cli import cli  # noqa: F401  (a fixture)
from tests.helpers.costs import fix_costs
from tests.helpers.models import ABSENT, SHARED, random_drafter, shared_path, tiny_llama

# Step times of tiny models are of no use to the user who runs the tests.
CACHE = Path(tempfile.mkdtemp(prefix="redrafter-tests-"))
os.environ["XDG_CACHE_HOME"] = str(CACHE)

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Trained(NamedTuple):
    """A trained model, its tokenizer, and an untrained drafter that fits it."""

    folder: Path
    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter


def _load(name: str) -> Trained:
    folder = shared_path(f"models/{name}")
    model, tokenizer, _ = load(folder)
    vocab_size, hidden_size = model["model"]["embed_tokens"].weight.shape
    return Trained(folder, model, tokenizer, random_drafter(vocab_size, hidden_size))


@pytest.fixture(scope="session")
def stories() -> Trained:
    return _load("stories260k")


@pytest.fixture(scope="session")
def babyllama() -> Trained:
    return _load("babyllama-tok105")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Free only what no other object refers to."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A small random model."""
    return tiny_llama(seed=4)


@pytest.fixture(scope="session")
def drafter_folder(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random drafter of stories260k as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(stories.drafter, folder)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with how to get what skipped tests lack."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    absent = [reason for reason in reasons if ABSENT in reason]
    if absent:
        terminalreporter.write_line(
            f"{len(absent)} tests were skipped for want of models and texts in {SHARED}: above all "
            "models/stories260k (karpathy/tinyllamas) and models/babyllama-tok105 (EN10/BabyLlama),"
            " in the layout of mlx-lm"
        )


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts from one random state and no estimates, and no choice depends on a clock."""
    for path in CACHE.glob("*/*.state"):
        path.unlink()
    mx.random.seed(0)
    fix_costs(monkeypatch)

"""A tiny pair with a checkpoint folder each, as the benchmarks load them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlx_redrafter.bench import forecast, turns
from mlx_redrafter.bench.lab.__main__ import call
from mlx_redrafter.checkpoint_files import named_parameters, write_checkpoint
from mlx_redrafter.engine import engine
from mlx_redrafter.proposers.checkpoint import save_drafter
from tests.helpers.cli import Cli
from tests.helpers.models import fast_tokenizer, random_drafter, tiny_llama, tiny_sizes


@pytest.fixture(scope="session")
def pair():
    """A random target and a random drafter, in memory."""
    return tiny_llama(vocab_size=264, context=4096, layers=2), random_drafter(264, 32)


@pytest.fixture(scope="session")
def folders(pair, tmp_path_factory) -> tuple[Path, Path]:
    """The same pair as checkpoint folders, with a byte-level tokenizer."""
    (model, drafter), base = pair, tmp_path_factory.mktemp("pair")
    config = tiny_sizes("llama", 264, 4096) | {"num_hidden_layers": 2, "eos_token_id": 0}
    write_checkpoint(base / "target", config, named_parameters(model))
    fast_tokenizer()._tokenizer.save_pretrained(base / "target")
    save_drafter(drafter, base / "drafter")
    return base / "target", base / "drafter"


@pytest.fixture
def bench(cli: Cli) -> Cli:
    """A function that runs a command of `redrafter-mlx bench`."""
    return partial(cli, "bench")


@pytest.fixture
def run_lab(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command of the laboratory and returns its output."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        call([str(argument) for argument in arguments])
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts in a file."""
    path = tmp_path / "p.txt"
    path.write_text("abc abc\n\nhello there\n")
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two prompts of two categories each, as Spec-Bench and SPEED-Bench publish them."""
    path = tmp_path / "tasks.jsonl"
    rows = [(f"{name}-{i}", name) for i in range(2) for name in ("coding", "qa")]
    lines = [
        {"question_id": question, "category": name, "turns": [f"{question} " * 3, "x"]}
        for question, name in rows
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def no_timing(monkeypatch) -> None:
    """Times of tiny models are of no use, and take most of the time."""
    monkeypatch.setattr(turns, "time_steps", lambda *_: None)
    monkeypatch.setattr(turns, "step_costs", lambda *_: None)
    # The costs that every test gets.
    monkeypatch.setattr(forecast, "step_costs", lambda *given: engine.step_costs(*given))

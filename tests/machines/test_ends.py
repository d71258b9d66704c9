"""Ranks that are killed, stopped or fail: all others end with one line, none is left behind."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.machines.line import LOST, PATIENCE
from tests.machines.ranks import Ended, started
from tests.models.tiny_models import build, flat_parameters, tiny_config

# Seconds that a rank may take beyond the limit, on a busy machine.
SLACK = 12.0


def store_tiny(folder: Path, family: str = "llama", **changes: object) -> Path:
    """A tiny model with the bundled tokenizer, as mlx-lm stores one."""
    config = {**tiny_config(family), "vocab_size": 4096, "eos_token_id": 2, **changes}
    config["max_position_embeddings"] = 4096
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(flat_parameters(build(config)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(Path(find_bundled("target")) / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_tiny(tmp_path_factory.mktemp("tiny"))


def end_of(
    folder: Path, fault: str = "", victim: int = 1, act: signal.Signals | None = None, size: int = 2
) -> tuple[list[Ended], float]:
    """How ranks end after a fault, and the seconds from it until all but the victim were gone."""
    with started(["-m", "tests.machines.endless", str(folder), fault], size) as ranks:
        if act is not None:
            ranks.wait_for("writing")
            ranks.processes[victim].send_signal(act)
        begun = time.monotonic()
        if act is signal.SIGSTOP:
            for rank, process in enumerate(ranks.processes):
                if rank != victim:
                    process.wait(PATIENCE + SLACK)
            ranks.processes[victim].kill()
        ended = ranks.wait(PATIENCE + SLACK)
        last = max(one.seconds for rank, one in enumerate(ended) if rank != victim)
    return ended, last - (begun - ranks.begun)


def _last_line(ended: Ended) -> str:
    return ended.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("victim", "line"), [(1, "redrafter-mlx: rank 1 ("), (0, "redrafter-mlx: rank 1 (")]
)
def test_a_killed_rank_ends_the_other(folder: Path, victim: int, line: str) -> None:
    ended, _ = end_of(folder, victim=victim, act=signal.SIGKILL)
    other = ended[1 - victim]
    assert other.code == LOST
    assert _last_line(other).startswith(line)
    assert _last_line(other).endswith("has gone") or "is lost" in _last_line(other)

"""A run that is killed again and again ends in the same files as one that is not."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.training.files import load_arrays
from mlx_redrafter.training.state import STATE_FILE
from tests.helpers.models import ROOT, shared_model

SCRIPT = """
import sys
from pathlib import Path
from mlx_redrafter.training import (
    DataOptions, NetworkOptions, TrainingOptions, TrainingRequest, train_drafter
)
from tests.training.pieces import Silent

model, text, out = sys.argv[1:]
train_drafter(
    TrainingRequest(
        model=model,
        out=Path(out),
        data=[Path(text)],
        resume=True,
        network=NetworkOptions(exit_dim=64, layers=1),
        data_options=DataOptions(tokens=1500, answer_tokens=32, held_out=4),
        training=TrainingOptions(
            epochs=2, batch_tokens=64, num_evaluations=3, patience=99, checkpoint_seconds=0
        ),
    ),
    Silent(),
)
"""
TIMEOUT = 250


def _start(text: Path, out: Path) -> subprocess.Popen[bytes]:
    paths = map(str, (shared_model("stories260k"), text, out))
    arguments = [sys.executable, "-c", SCRIPT, *paths]
    return subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.002)


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill -9; whether it was still running."""
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def _changes(path: Path) -> Callable[[], bool]:
    """Make a condition that holds once the file is written again."""
    before = path.stat().st_mtime_ns if path.exists() else None
    return lambda: path.exists() and path.stat().st_mtime_ns != before


@pytest.mark.timeout(600)
def test_killed_at_random_moments_and_resumed(stories_file: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = _start(stories_file, whole)
    state = parts / "state" / STATE_FILE
    rng = random.Random(4)
    # While the target reads, while it writes, and while the drafter learns.
    files = ("train-00000.safetensors", "train-00001.safetensors")
    moments = [*(parts / "cache" / name for name in files), state]
    kills = 0
    for path in moments:
        process = _start(stories_file, parts)
        _wait_for(_changes(path), process)
        time.sleep(rng.random() * 0.3)
        kills += _kill(process)
    assert kills >= 2
    last = _start(stories_file, parts)
    assert last.wait(TIMEOUT) == 0
    assert undisturbed.wait(TIMEOUT) == 0

    first, second = (load_arrays(f / "state" / STATE_FILE)[0] for f in (whole, parts))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[name], second[name]).item() for name in first)
    for name in ("model.safetensors", "config.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert not list(parts.rglob(".*"))

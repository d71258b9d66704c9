"""Ranks that are killed or fail: all others end with one line, and none is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.bench.lab.machine_ends import EVENTS, end_by
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.machines.line import LOST
from tests.models.tiny_models import build, flat_parameters, tiny_config


def store_tiny(folder: Path, family: str = "llama", **changes: object) -> Path:
    """Write a tiny model with the bundled tokenizer, as mlx-lm stores one."""
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


@pytest.mark.parametrize(
    ("event", "codes", "line"),
    [
        ("a follower is killed", [LOST, -9], "has gone"),
        ("a follower raises in a pass", [LOST, 1], "MemoryError: no memory for a buffer of 12 GB"),
    ],
)
def test_a_lost_rank_ends_the_other(folder: Path, event: str, codes: list[int], line: str) -> None:
    assert event in EVENTS
    end = end_by(event, str(folder))
    assert end.codes == codes
    assert end.lines[0].startswith("redrafter-mlx: rank 1 (")
    assert line in end.lines[0]

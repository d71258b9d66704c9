"""A rank that fails in a pass: all others end with its line."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

from mlx_redrafter.bench.lab.machine_ends import end_by
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


def test_a_rank_that_fails_ends_the_other(tmp_path: Path) -> None:
    end = end_by("a follower raises in a pass", str(store_tiny(tmp_path / "tiny")))
    assert end.codes == [LOST, 1]
    assert end.lines[0].startswith("redrafter-mlx: rank 1 (")
    assert end.lines[0].endswith("MemoryError: no memory for a buffer of 12 GB")

"""Checkpoint folders: finding, reading and writing, and files that are damaged or foreign."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoint_files import (
    MAX_JSON_BYTES,
    find_checkpoint,
    read_config,
    read_shapes,
    read_tensors,
    write_atomically,
    write_checkpoint,
)
from mlx_redrafter.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint."""
    tensors = {"a": mx.arange(6, dtype=mx.float32).reshape(2, 3), "b": mx.ones(4, mx.bfloat16)}
    write_checkpoint(tmp_path / "checkpoint", {"model_type": "x"}, tensors)
    return tmp_path / "checkpoint"


def test_round_trip(folder: Path) -> None:
    assert find_checkpoint(folder) == folder
    assert read_config(folder) == {"model_type": "x"}
    assert read_shapes(folder) == {"a": (2, 3), "b": (4,)}
    tensors = read_tensors(folder)
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].dtype == mx.bfloat16
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert os.stat(folder / "model.safetensors").st_mode & 0o777 == 0o644, "others may read it"
    # Shards are read together.
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    mx.save_safetensors(str(folder / "model-00002-of-00002.safetensors"), {"c": mx.ones(2)})
    assert set(read_shapes(folder)) == set(read_tensors(folder)) == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_a_folder_is_rejected_and_not_read(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = rf"expected a regular file, found a pipe.*{name}; remove it"
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(folder)
    readers = {"config.json": read_config, "model.safetensors": read_shapes}
    if name in readers:
        with pytest.raises(CheckpointError, match=message):
            readers[name](folder)


def test_no_such_folder(folder: Path) -> None:
    for name in ("no-such-folder", "./no/such", "/no/such/folder", "~/no/such/folder", "a/b/c"):
        with pytest.raises(CheckpointError, match=r"no such folder: .*; give a checkpoint folder"):
            find_checkpoint(name)
    unknown = r"'nobody/nothing' is neither a local folder nor a repository"
    with pytest.raises(CheckpointError, match=unknown) as caught:
        find_checkpoint("nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found a file"):
        find_checkpoint(folder / "config.json")


def test_missing_files(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in .*found weights alone"):
        read_config(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\*\.safetensors in"):
        read_shapes(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object in .*, found list"),
        (b"{", "cannot read .*config.json: "),
        (b"", "cannot read .*config.json: "),
        (b"[" * 100_000, "cannot read .*config.json: "),
        (b" " * (MAX_JSON_BYTES + 1), "expected at most 16777216 bytes, found 16777217"),
        (b"\xff\xfe\x00\x80", "cannot read .*config.json: "),
    ],
    ids=["list", "torn", "empty", "deep", "long", "binary"],
)
def test_foreign_configs(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


def _header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


# The last one claims tensors that no memory holds.
CLAIM = {"a": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}
FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    **{f"first {end}": lambda data, end=end: data[:end] for end in (0, 4, 8, 40, -1)},  # type: ignore[misc]
    "zip": lambda _: b"PK\x03\x04" + b"\x00" * 60,
    "pickle": lambda _: b"\x80\x04\x95hello" * 10,
    "huge header": lambda _: b"\xff" * 64,
    "no header": lambda _: _header(b'{"a": [1, 2, 3, 4]}x'),
    "claim": lambda _: _header(json.dumps(CLAIM).encode()),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_truncated_and_foreign_weights(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(FOREIGN[kind](path.read_bytes()))
    for read in (read_shapes, read_tensors):
        with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
            read(folder)


def test_failed_writing_leaves_the_old_file(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    before = (folder / "config.json").read_text()
    with pytest.raises(OSError, match="disk full"):
        write_atomically(folder / "config.json", fail)
    assert (folder / "config.json").read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]

"""Drafter checkpoints written without torch, byte by byte, so that they can be wrong on purpose."""

import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.numpy import save

from mlx_redrafter.convert.conversion import Conversion, convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.errors import CheckpointError

CONFIG = {
    "model_type": "recurrent_drafting_drafter", "vocab_size": 70, "hidden_size": 8, "exit_dim": 12,
    "num_draft_layers": 2, "num_lookback_tokens": -1, "rnn": True,
}  # fmt: skip


def shapes(config: Mapping[str, object] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Apple's names and shapes, written down here a second time on purpose."""
    hidden, width, rows = (int(config[k]) for k in ("hidden_size", "exit_dim", "vocab_size"))
    layers = int(config["num_draft_layers"])
    result: dict[str, tuple[int, ...]] = {}
    if width != 2 * hidden:
        result |= {"input_proj.weight": (width, 2 * hidden), "input_proj.bias": (width,)}
    for i in range(layers):
        result[f"lm_head.{i}.linear.weight"] = (width, width)
        result[f"lm_head.{i}.linear.bias"] = (width,)
    result[f"lm_head.{layers}.weight"] = (rows, width)
    if config["rnn"]:
        square = (hidden, hidden)
        result |= {"rnn_u.weight": square, "rnn_u.bias": (hidden,), "rnn_w.weight": square}
    return result


def tensors(config: Mapping[str, object] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a drafter."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape) / 3).astype(np.float32)
        for name, shape in shapes(config).items()
    }


def medusa(
    num_heads: int, hidden: int = 8, rows: int = 70, blocks: int = 1
) -> dict[str, np.ndarray]:
    """Random heads, named as FasterDecoding does."""
    random = np.random.default_rng(0)
    values = {}
    for head in range(num_heads):
        for block in range(blocks):
            values[f"{head}.{block}.linear.weight"] = random.standard_normal((hidden, hidden))
            values[f"{head}.{block}.linear.bias"] = random.standard_normal(hidden)
        values[f"{head}.{blocks}.weight"] = random.standard_normal((rows, hidden))
    return {name: value.astype(np.float32) for name, value in values.items()}


def write_config(folder: Path, values: Mapping[str, object] = CONFIG) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(values)))


def headed(header: bytes, data: bytes = b"", claim: int | None = None) -> bytes:
    """A safetensors file of a header, of which it may claim another length."""
    return struct.pack("<Q", len(header) if claim is None else claim) + header + data


def text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return b"X" + struct.pack("<I", len(raw)) + raw


# A call of a shell.
SYSTEM = b"cposix\nsystem\n(" + text("touch executed") + b"tR"


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(number(value) for value in values) + b"t"


def storage(key: str, size: int) -> bytes:
    identity = text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    return b"(" + identity + number(size) + b"tQ"


def tensor(
    stored: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> bytes:
    """The opcodes of one tensor, as ``torch.save`` writes them but for the memo."""
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = stored + number(offset) + numbers(shape) + numbers(strides) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def state_dict(items: Mapping[str, bytes]) -> bytes:
    """A pickle of a dict from names to whatever the opcodes build."""
    body = b"".join(text(name) + opcodes for name, opcodes in items.items())
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + body + b"u."


def pickled(values: Mapping[str, np.ndarray]) -> bytes:
    items = {}
    for i, (name, value) in enumerate(values.items()):
        strides = tuple(stride // value.itemsize for stride in value.strides)
        items[name] = tensor(storage(str(i), value.size), value.shape, strides)
    return state_dict(items)


def write_zip(file: Path | BinaryIO, pickle_bytes: bytes, values: Mapping[str, np.ndarray]) -> None:
    """The zip format."""
    members = {"data.pkl": pickle_bytes, "byteorder": b"little"}
    members |= {f"data/{i}": value.tobytes() for i, value in enumerate(values.values())}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)


def write(
    folder: Path,
    values: Mapping[str, np.ndarray],
    config: Mapping[str, object] = CONFIG,
    file: str = "model.safetensors",
) -> Path:
    """A folder with these tensors, in the zip format unless in safetensors."""
    write_config(folder, config)
    if file.endswith(".safetensors"):
        (folder / file).write_bytes(save(dict(values)))
    else:
        write_zip(folder / file, pickled(values), values)
    return folder


def convert(source: str | Path, out: Path, **options: Any) -> Conversion:
    return convert_drafter(source, out, ConversionOptions(**options))


def refusal(folder: Path, **options: Any) -> str:
    """The message of a refused conversion, one printable line, which leaves nothing behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        convert(folder, folder.parent / "out", **options)
    assert sorted(folder.parent.iterdir()) == before
    message = str(caught.value)
    assert len(message) < 2000
    assert message.isprintable()
    return message

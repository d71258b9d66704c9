"""The pair that ships: without a model, on the command line and in Python."""

import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter import Drafter, load, save_drafter
from mlx_redrafter.checkpoints import bundled
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.training import fingerprint_weights
from tests.helpers.models import random_drafter

PROMPT = "The old man opened the door and"
NOTE = "no --model given: using the bundled demonstration model ("
FILES = {
    "target": {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"},
    "drafter": {"config.json", "model.safetensors"},
}
# As bench/lab/pair/sample_target.py writes them.
SAMPLE = re.compile(r"^\*\*Seed \d+\*\*", re.MULTILINE)


class Pair(NamedTuple):
    """The pair's folder, and its target and tokenizer as stock mlx-lm loads them, in float32."""

    folder: Path
    model: nn.Module
    tokenizer: Any
    stored_fingerprint: str


@pytest.fixture(scope="module")
def pair() -> Pair:
    folder = find_bundled("target").parent
    model, tokenizer, *_ = mlx_lm.load(str(folder / "target"))
    stored = fingerprint_weights(model)
    model.set_dtype(mx.float32)
    return Pair(folder, model, tokenizer, stored)


def _dtypes(module: nn.Module) -> set[mx.Dtype]:
    tensors: list[tuple[str, Any]] = tree_flatten(module.parameters())  # type: ignore[assignment]
    return {tensor.dtype for _, tensor in tensors if mx.issubdtype(tensor.dtype, mx.floating)}


@pytest.mark.parametrize("drafting", [[], ["--drafter", "none"]], ids=str)
def test_text_is_stock_mlx_lms(pair, cli, monkeypatch, tmp_path, drafting):
    """In any folder, and without a network."""
    refuse = Mock(side_effect=AssertionError("something was to be fetched"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    result = cli("generate", "-p", PROMPT, "-m", 60, "--stats", *drafting)
    stock = mlx_lm.generate(pair.model, pair.tokenizer, PROMPT, max_tokens=60)
    assert (result.code, result.out) == (0, stock + "\n")
    assert result.err.startswith(NOTE)
    assert result.err.count(NOTE) == 1
    assert ("Speculative: " in result.err) == (drafting == [])


def test_a_drafter_of_ones_own(pair, cli, tmp_path):
    vocab_size, hidden_size = pair.model["model"]["embed_tokens"].weight.shape
    own = random_drafter(vocab_size, hidden_size, exit_dim=32, dtype=mx.float16)
    save_drafter(own, tmp_path)
    loaded = load(drafter=tmp_path)[2]
    assert isinstance(loaded, Drafter)
    assert loaded.config == own.config
    assert _dtypes(loaded) == {mx.float32}
    result = cli("generate", "--drafter", tmp_path, "-p", PROMPT, "-m", 30)
    stock = mlx_lm.generate(pair.model, pair.tokenizer, PROMPT, max_tokens=30)
    assert (result.code, result.out) == (0, stock + "\n")


def test_pairs_are_loaded_in_float32_and_folders_as_they_are_stored(pair):
    model, tokenizer, drafter = load()
    assert isinstance(drafter, Drafter)
    assert _dtypes(model) == _dtypes(drafter) == {mx.float32}
    assert fingerprint_weights(model) == fingerprint_weights(pair.model)
    assert tokenizer.vocab_size == pair.tokenizer.vocab_size
    model, _, drafter = load(pair.folder / "target")
    assert fingerprint_weights(model) == pair.stored_fingerprint
    assert drafter is None


def test_files_and_cards(pair):
    """The drafter's card names the target's weights, as stored or as they are computed with."""
    for part, names in FILES.items():
        assert {path.name for path in (pair.folder / part).iterdir()} == names | {"README.md"}
    card = (pair.folder / "target" / "README.md").read_text(encoding="utf-8")
    assert "bits per byte" in card
    assert len(SAMPLE.findall(card)) == 10
    card = (pair.folder / "drafter" / "README.md").read_text(encoding="utf-8")
    config = json.loads((pair.folder / "drafter" / "config.json").read_text())
    recorded = config["target"]["fingerprint"]
    assert recorded in {pair.stored_fingerprint, fingerprint_weights(pair.model)}
    assert f"weights {recorded}" in card
    assert "tokens/step" in card


def test_an_absent_pair(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    for command in (["generate", "-p", "Hi"], ["check"]):
        result = cli(*command)
        assert (result.code, result.out) == (1, "")
        (line,) = result.err.splitlines()
        assert line.startswith("error: expected the bundled target in ")
        assert ", found none; install mlx-redrafter again" in line

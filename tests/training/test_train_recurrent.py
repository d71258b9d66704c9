"""A drafter for a model with recurrent layers: from texts to text, through every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from tests.helpers.cli import Cli
from tests.models.tiny_models import build, flat_parameters, tiny_config

TEXTS = ["Tom has a red ball and a big dog.", "Sam sees the dog and the red ball."] * 4


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """Write a random model with gated delta nets, which has the tokenizer of the bundled one."""
    folder, source = tmp_path / "hybrid", find_bundled("target")
    shutil.copytree(source, folder)
    tokenizer = read_config(source)
    config = {**tiny_config("qwen3_5"), "eos_token_id": tokenizer["eos_token_id"]}
    sizes = {"vocab_size": tokenizer["vocab_size"], "max_position_embeddings": 512}
    config["text_config"] = {**config["text_config"], **sizes, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(flat_parameters(build(config))), {"format": "mlx"}
    )
    return folder


def test_train_generate_and_check(tmp_path: Path, cli: Cli, hybrid: Path) -> None:
    texts, out = tmp_path / "texts.jsonl", tmp_path / "drafter"
    texts.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    options = ("--answer-tokens", 8, "--epochs", 2)
    trained = cli("train", "--model", hybrid, "--data", texts, "--out", out, *options)
    assert trained.code == 0, trained.err

    prompt = ("--model", hybrid, "--prompt", "Tom has a dog.", "--max-tokens", 24)
    plain = cli("generate", *prompt, "--drafter", "none", "--json")
    drafted = cli("generate", *prompt, "--drafter", out, "--json")
    assert drafted.code == 0, drafted.err
    assert json.loads(drafted.out)["tokens"] == json.loads(plain.out)["tokens"]

    checked = cli("check", *prompt, "--drafter", out, "--json")
    assert checked.code == 0, checked.err

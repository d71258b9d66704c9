"""Training and drafting for targets whose layers have windows or chunks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from mlx_redrafter.training import (
    DataOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
    train_drafter,
)
from tests.helpers.cli import Cli
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.models import shared_model
from tests.models.tiny_models import WINDOW, build, flat_parameters, windowed_config
from tests.training.pieces import Silent

VOCAB_SIZE = 512
NUM_TOKENS = 60


def save_target(model_type: str, folder: Path) -> None:
    """Write a random model that has a layer with a window, and the tokenizer of another."""
    source = shared_model("stories260k")
    folder.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    config = {**windowed_config(model_type), "vocab_size": VOCAB_SIZE}
    if "text_config" in config:
        config["text_config"]["vocab_size"] = VOCAB_SIZE
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(flat_parameters(build(config))))


@pytest.mark.parametrize(
    ("model_type", "epochs", "least"),
    # Text of random experts is hard to predict.
    [("gemma3_text", 80, 1.5), ("gpt_oss", 2, 1), ("llama4", 2, 1)],
)
def test_from_training_to_drafted_text(
    model_type: str, epochs: int, least: float, tmp_path: Path, cli: Cli
) -> None:
    target, out, file = (tmp_path / name for name in ("target", "drafter", "prompts.txt"))
    save_target(model_type, target)
    lines = ["One day a cat met a big red dog", "Tom and Sue", "In the park", "The sun"]
    file.write_text("\n".join(lines))
    request = TrainingRequest(
        str(target),
        out,
        prompts=[file],
        data_options=DataOptions(answer_tokens=4 * WINDOW, temp=0),
        network=NetworkOptions(exit_dim=64, layers=1),
        training=TrainingOptions(epochs=epochs, batch_tokens=64, num_evaluations=1),
    )
    assert train_drafter(request, Silent()) is not None

    text = ("--prompt", lines[0], "--max-tokens", NUM_TOKENS, "--json")
    pair = ("--model", target, "--drafter", out)
    result = cli("generate", *pair, *text, "--beam-width", 2)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    model, tokenizer, *_ = mlx_lm.load(str(target))
    prompt = tokenizer.encode(lines[0])
    assert len(prompt) > WINDOW
    assert found["tokens"] == ids(stock_tokens(model, prompt, NUM_TOKENS))
    assert found["tokens_per_step"] >= least

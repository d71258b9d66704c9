"""Training and drafting for targets whose layers have windows, chunks or states."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.training import (
    DataOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
    train_drafter,
)
from tests.helpers.cli import Cli
from tests.helpers.equality import ids, stock_tokens
from tests.models.tiny_models import WINDOW, build, flat_parameters, tiny_config, windowed_config
from tests.training.pieces import Silent

PROMPTS = ["One day a cat met a big red dog", "Tom and Sue", "In the park", "The sun"]


def save_target(model_type: str, folder: Path) -> None:
    """Write a random model that has such layers, and the tokenizer of the bundled one."""
    source = find_bundled("target")
    shutil.copytree(source, folder)
    known = read_config(source)
    make = tiny_config if model_type == "qwen3_5" else windowed_config
    config = {**make(model_type), "eos_token_id": known["eos_token_id"]}
    inner = config.get("text_config", config)
    inner |= {"vocab_size": known["vocab_size"], "max_position_embeddings": 512}
    if model_type == "qwen3_5":
        inner["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(flat_parameters(build(config)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


@pytest.mark.parametrize(
    ("model_type", "epochs", "least"),
    [("gemma3_text", 60, 1.5), ("llama4", 2, 1), ("qwen3_5", 2, 1)],
)
def test_from_training_to_drafted_text(
    model_type: str, epochs: int, least: float, tmp_path: Path, cli: Cli
) -> None:
    target, out, file = (tmp_path / name for name in ("target", "drafter", "prompts.txt"))
    save_target(model_type, target)
    file.write_text("\n".join(PROMPTS))
    request = TrainingRequest(
        str(target),
        out,
        prompts=[file],
        data_options=DataOptions(answer_tokens=4 * WINDOW, temp=0),
        network=NetworkOptions(exit_dim=64, layers=1),
        training=TrainingOptions(epochs=epochs, batch_tokens=64, num_evaluations=1),
    )
    assert train_drafter(request, Silent()) is not None
    pair = ("--model", target, "--drafter", out, "--prompt", PROMPTS[0])
    result = cli("generate", *pair, "--max-tokens", 40, "--json", "--beam-width", 2)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    model, tokenizer, *_ = mlx_lm.load(str(target))
    prompt = tokenizer.encode(PROMPTS[0])
    assert len(prompt) > WINDOW
    assert found["tokens"] == ids(stock_tokens(model, prompt, 40))
    assert found["tokens_per_step"] >= least
    assert cli("check", *pair, "--max-tokens", 12).code == 0

"""Widening changes the size of a model, not its function."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.utils
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

from mlx_redrafter.bench.lab.__main__ import main
from mlx_redrafter.bench.lab.llama_shape import LlamaShape, widened_shape
from mlx_redrafter.bench.lab.widen import widen_drafter, widen_target, widened_drafter
from mlx_redrafter.checkpoint_files import write_checkpoint
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from tests.helpers.models import random_drafter, shared_model
from tests.helpers.recurrent_search import expand

CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-2,
    "rope_theta": 10000.0,
}


def read_model(folder: Path) -> llama.Model:
    config = json.loads((folder / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.load_weights(str(folder / "model.safetensors"))
    return model


def write_model(folder: Path, config: dict) -> llama.Model:
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    # Larger than the initial values, so that a misplaced weight shows.
    scaled = [
        (k, 3 * mx.random.normal(v.shape) / v.shape[-1] ** 0.5)
        for k, v in mlx.utils.tree_flatten(model.parameters())
    ]
    model.load_weights(scaled)
    write_checkpoint(folder, config, dict(mlx.utils.tree_flatten(model.parameters())))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_layers", [None, 5])
def test_logits_stay(tmp_path, is_tied, num_layers):
    small = write_model(tmp_path / "small", {**CONFIG, "tie_word_embeddings": is_tied})
    shape = widen_target(tmp_path / "small", tmp_path / "wide", 5_000_000, num_layers)
    wide = read_model(tmp_path / "wide")
    parameters = sum(v.size for _, v in mlx.utils.tree_flatten(wide.parameters()))
    assert parameters == shape.num_parameters
    assert 0.8 < parameters / 5_000_000 < 1.2
    assert wide.args.max_position_embeddings == 128
    assert shape.head_dim == 64
    assert (tmp_path / "wide" / "tokenizer_config.json").exists()
    tokens = mx.random.randint(0, 97, (1, 60))
    expected, found = small(tokens), wide(tokens)
    assert mx.max(mx.abs(expected)) > 1
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)
    hidden, wide_hidden = small.model(tokens), wide.model(tokens)
    assert mx.allclose(wide_hidden[..., :48], hidden, rtol=1e-4, atol=1e-4)
    assert not mx.any(wide_hidden[..., 48:])


def test_greedy_text_of_a_trained_model_stays(tmp_path):
    folder = shared_model("stories260k")
    widen_target(folder, tmp_path, 12_000_000)
    small, _, *_ = mlx_lm.load(str(folder))
    wide, tokenizer, *_ = mlx_lm.load(str(tmp_path))
    prompt = mx.array(tokenizer.encode("Once upon a time"))
    expected, found = (
        [int(token) for token, _ in generate_step(prompt, model, max_tokens=60)]
        for model in (small, wide)
    )
    assert found == expected


@pytest.mark.parametrize(
    "values",
    [
        {"exit_dim": 96, "rnn": True},
        {"exit_dim": 96, "rnn": False, "draft_vocab_size": 60},
        {"exit_dim": 40, "rnn": True, "num_draft_layers": 0},
        {"exit_dim": 40, "rnn": False},
    ],
)
def test_drafts_stay(tmp_path, values):
    config = DrafterConfig.from_dict(
        {"vocab_size": 97, "hidden_size": 48, "num_draft_layers": 2, **values}
    )
    mx.random.seed(5)
    small = Drafter(config)
    small.update(
        mlx.utils.tree_map(
            lambda v: v if v.dtype == mx.int32 else mx.random.normal(v.shape) * 0.1,
            small.parameters(),
        )
    )
    save_drafter(small, tmp_path / "small")
    config = widen_drafter(tmp_path / "small", tmp_path / "wide", 320)
    wide = widened_drafter(small, 320)
    assert config.has_input_proj == small.config.has_input_proj
    if config.has_input_proj:
        assert config.exit_dim == small.config.exit_dim
    assert wide.config == config
    table = mx.random.normal((97, 48))
    wide_table = mx.pad(table, [(0, 0), (0, 272)])
    hidden, root = mx.random.normal((48,)), mx.array([11])
    wide_hidden = mx.pad(hidden, (0, 272))
    shape = DraftShape(3, 4)
    expected = expand(small, lambda t: table[t], hidden, root, shape)
    found = expand(wide, lambda t: wide_table[t], wide_hidden, root, shape)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.parents.tolist() == expected.parents.tolist()
    assert mx.allclose(found.scores, expected.scores, atol=1e-4)


def test_refusals():
    old = LlamaShape.from_config(CONFIG)
    with pytest.raises(ConfigError, match="at least the model's 2, got 1"):
        widened_shape(old, 10**6, 1)
    with pytest.raises(ConfigError, match="ask for more"):
        widened_shape(old, 10)
    with pytest.raises(CheckpointError, match="found 'gpt2'"):
        LlamaShape.from_config({**CONFIG, "model_type": "gpt2"})
    with pytest.raises(CheckpointError, match="quantization"):
        LlamaShape.from_config({**CONFIG, "quantization": {"bits": 4}})


def test_nothing_is_overwritten(tmp_path):
    source = tmp_path / "small"
    write_model(source, CONFIG)
    before = {path: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ConfigError, match="found what this call reads"):
        widen_target(source, source, 10**6)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="which this command did not write"):
        widen_target(source, mine, 10**6)
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "small"]


def test_both_folders_are_checked_before_the_work(tmp_path):
    drafter = tmp_path / "drafter"
    save_drafter(random_drafter(CONFIG["vocab_size"], CONFIG["hidden_size"]), drafter)
    source, wide = tmp_path / "small", tmp_path / "wide"
    write_model(source, CONFIG)
    for out in (drafter, source, wide):
        options = ["--parameters", "1M", "--drafter", str(drafter), "--drafter-out", str(out)]
        assert main(["widen", str(source), str(wide), *options]) == 2
        assert not wide.exists()

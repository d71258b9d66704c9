"""Drafter folders: what is written is read back; what does not fit is named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter import Drafter, generate, load_drafter, save_drafter
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from mlx_redrafter.proposers.quantization import quantize_drafter
from tests.conftest import Trained
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE, HIDDEN_SIZE = 64, 32


def _assert_same_drafter(found: Drafter, expected: Drafter) -> None:
    assert found.config == expected.config
    leaves, truth = (dict(tree_flatten(d.parameters())) for d in (found, expected))
    assert leaves.keys() == truth.keys()
    for name, leaf in leaves.items():
        assert leaf.dtype == truth[name].dtype, name
        assert mx.array_equal(leaf, truth[name]).item(), name


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize(("layers", "exit_dim"), [(0, 64), (0, 96), (2, 64), (3, 96)])
def test_round_trip_and_text(
    dtype: mx.Dtype, rnn: bool, layers: int, exit_dim: int, tmp_path: Path
) -> None:
    sizes = {"num_draft_layers": layers, "exit_dim": exit_dim}
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, rnn=rnn, dtype=dtype, **sizes)
    _assert_round_trip(drafter, tmp_path / "drafter", {"made_by": "a test"})
    assert json.loads((tmp_path / "drafter/config.json").read_text())["made_by"] == "a test"
    files = sorted(path.name for path in (tmp_path / "drafter").iterdir())
    assert files == ["config.json", "model.safetensors"]


def _assert_round_trip(drafter: Drafter, folder: Path, provenance: Any = None) -> Drafter:
    """What is written is read back, and leaves a text as it is."""
    save_drafter(drafter, folder, provenance)
    loaded = load_drafter(folder)
    _assert_same_drafter(loaded, drafter)
    model, tokenizer = tiny_llama(seed=6, layers=1), wrapped_tokenizer(VOCAB_SIZE)
    plain = generate(model, tokenizer, [3, 4], drafter=None, max_tokens=12)
    assert generate(model, tokenizer, [3, 4], max_tokens=12, drafter=loaded) == plain
    return loaded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("exit_dim", [64, 40])
def test_quantised_round_trip_and_text(bits: int, exit_dim: int, tmp_path: Path) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=exit_dim)
    quantize_drafter(drafter, bits, 32)
    assert _assert_round_trip(drafter, tmp_path).dtype == mx.float32
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert quantization == {"group_size": 32, "bits": bits}
    # A used drafter can be pickled.
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    found = drafter.log_probs(hidden, state[None], drafter.hidden_term(hidden))
    copy = pickle.loads(pickle.dumps(drafter))
    assert mx.array_equal(copy.log_probs(hidden, state[None], copy.hidden_term(hidden)), found)


def test_partial_head_round_trip(tmp_path: Path) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=10)
    drafter.token_ids = mx.array([50, 1, 2, 3, 4, 60, 6, 7, 8, 9], dtype=mx.int32)
    _assert_round_trip(drafter, tmp_path)


def test_token_ids_that_would_break_a_tree_are_refused(tmp_path: Path) -> None:
    """Equal siblings would both be accepted; ids out of range would read foreign memory."""
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=3)
    for token_ids, message in (
        ([3, 3, 4], "token_ids .*twice"),
        ([3, 4, VOCAB_SIZE], "token_ids .*from 0 to 63"),
        ([3, 4, -1], "token_ids .*from 0 to 63"),
        ([3.0, 4.0, 5.0], "token_ids .*integers"),
    ):
        drafter.token_ids = mx.array(token_ids)
        save_drafter(drafter, tmp_path)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path)


def _save_with(
    drafter: Drafter,
    folder: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    **config: Any,
) -> None:
    """Save a drafter, and change its tensors and config on the disk."""
    save_drafter(drafter, folder, config)
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "new.safetensors"), change(dict(tensors)))
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        del tensors["rnn_u.bias"]
        tensors["lm_head.1.weight"] = mx.zeros((VOCAB_SIZE, 5))
        tensors["surprise"] = mx.zeros((1,))
        return tensors

    _save_with(random_drafter(VOCAB_SIZE, HIDDEN_SIZE), tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path)
    message = str(caught.value)
    assert "rnn_u.bias is missing" in message
    assert "'surprise' of shape [1] is unexpected" in message
    assert "lm_head.1.weight' has shape [64, 5], expected [64, 64]" in message
    # A long list of them is cut, and a tensor that Apple's code does not use is none of them.
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    _save_with(drafter, tmp_path, dict, num_draft_layers=64)
    with pytest.raises(CheckpointError, match=r"lm_head\.\d+.* and \d+ more") as caught:
        load_drafter(tmp_path)
    assert len(str(caught.value)) < 1200
    _save_with(drafter, tmp_path, lambda tensors: {**tensors, "emb_norm.weight": mx.ones((32,))})
    _assert_same_drafter(load_drafter(tmp_path), drafter)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", [None, 4])
def test_weights_that_are_no_numbers_are_named(
    value: float, bits: int | None, tmp_path: Path
) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    if bits:
        quantize_drafter(drafter, bits, 32)
    bias: Any = drafter.rnn_u.bias
    bias[3] = value
    save_drafter(drafter, tmp_path)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite weights in rnn_u\.bias; convert"):
        load_drafter(tmp_path)


def test_impossible_quantisation(tmp_path: Path) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    for quantization, message in (
        ([4], 'expected "quantization" to be an object'),
        ({"group_size": 32, "bits": 5}, "bits must be one of"),
        ({"group_size": 16, "bits": 4}, "group_size must be one of"),
        ({}, "bits must be one of"),
    ):
        save_drafter(drafter, tmp_path, {"quantization": quantization})
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path)
    with pytest.raises(ConfigError, match="group_size 128 wide"):
        quantize_drafter(drafter, 4, 128)


def test_a_claim_in_the_config_allocates_nothing(tmp_path: Path) -> None:
    """The weights of a 16-million-row head would not fit into memory."""
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    save_drafter(drafter, tmp_path, {"vocab_size": 2**24, "exit_dim": 2**20})
    before = mx.get_peak_memory()
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
        load_drafter(tmp_path)
    assert mx.get_peak_memory() - before < 2**20


def test_weights_are_in_memory_after_loading(stories: Trained, tmp_path: Path) -> None:
    """A file that is replaced or deleted later must not matter."""
    save_drafter(stories.drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    _assert_same_drafter(loaded, stories.drafter)

"""Estimated memory is the measured peak, within 10% above and 5% below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter import Lookup, load, stream_generate
from mlx_redrafter.checkpoints import memory_check
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.memory_check import check_memory
from mlx_redrafter.checkpoints.memory_estimate import (
    TREE_TOKENS,
    Context,
    cache_bytes,
    estimate_memory,
    fused_growth,
)
from mlx_redrafter.errors import ResourceError
from tests.models.tiny_models import build, tiny_config

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "moe_intermediate_size": 128,
}
# Tokens of a chunk of the prompt.
CHUNK = 256


def _write(folder: Path, model_type: str, bits: int | None) -> nn.Module:
    """Write a random model, and return it."""
    config: dict[str, Any] = tiny_config(model_type)
    config["torch_dtype"] = "float32"
    for values in (config, config.get("text_config", {})):
        values.update({key: size for key, size in SIZES.items() if key in values})
    model = build(config)
    if bits is not None:
        nn.quantize(model, 64, bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    mx.eval(model.parameters())
    return model


def _measure(model: nn.Module, tokens: int) -> int:
    """Peak memory of a prompt in chunks, of a step and of a tree's scores, with the weights."""
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    prompt = mx.zeros((1, tokens), mx.int32)
    for start in range(0, tokens - 1, CHUNK):
        model(prompt[:, start : min(start + CHUNK, tokens - 1)], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    mx.eval(model(mx.array([[1]]), cache=cache))
    logits = model(mx.zeros((1, TREE_TOKENS), mx.int32), cache=cache).astype(mx.float32)
    mx.eval(mx.argsort(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1))
    return weights + mx.get_peak_memory() - before


@pytest.mark.parametrize(
    ("model_type", "bits", "lengths"),
    [
        ("llama", None, (200, 700)),
        ("llama", 4, (200,)),
        ("gemma3_text", None, (700,)),
        ("qwen3_moe", None, (200,)),
        ("qwen3_5", None, (200,)),
        ("starcoder2", None, (200,)),
    ],
)
def test_the_estimate_is_the_measured_peak(
    tmp_path: Path, model_type: str, bits: int | None, lengths: tuple[int, ...]
) -> None:
    model = _write(tmp_path, model_type, bits)
    for tokens in lengths:
        estimated = estimate_memory(tmp_path, None, Context(tokens, CHUNK))
        measured = _measure(model, tokens)
        assert 0.95 <= estimated.total / measured <= 1.1, (tokens, estimated, measured)


@pytest.mark.parametrize("has_drafter", [False, True])
def test_the_estimate_is_the_peak_of_the_engine(has_drafter: bool) -> None:
    target, drafter = find_bundled("target"), find_bundled("drafter") if has_drafter else None
    estimated = estimate_memory(target, drafter, Context(132)).total
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, tokenizer, proposer = load(target, drafter, tune=False)
    shape = {"beam_width": 4, "beam_length": 5, "tree_nodes": 16} if has_drafter else {}
    *_, _ = stream_generate(
        model, tokenizer, list(range(5, 105)), drafter=proposer or Lookup(), max_tokens=32, **shape
    )
    measured = mx.get_peak_memory() - before
    assert 0.95 <= estimated / measured <= 1.1, (estimated, measured)


@pytest.mark.parametrize("model_type", ["falcon_h1", "llama"])
def test_caches_have_the_size_of_those_of_mlx_lm(tmp_path: Path, model_type: str) -> None:
    model = _write(tmp_path, model_type, None)
    caches = make_prompt_cache(model)
    for _ in range(2):
        model(mx.zeros((1, 256), mx.int32), cache=caches)
    parts = [part for one in caches for part in getattr(one, "caches", [one])]
    states = [(one.keys, one.values) if hasattr(one, "keys") else one.state for one in parts]
    expected = sum(one.nbytes for _, one in tree_flatten(states) if isinstance(one, mx.array))
    assert cache_bytes(tmp_path, Context(512, CHUNK)) == expected


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_layers_of_an_adapter_grow_as_they_are_fused(tmp_path: Path, model_type: str) -> None:
    model = _write(tmp_path, model_type, 4)
    before = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    linear_to_lora_layers(model, 2, {"rank": 3, "scale": 1.0, "dropout": 0.0})
    adapter = {name: array for name, array in tree_flatten(model.parameters()) if "lora_" in name}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapter)
    fused = [(name, one.fuse(True)) for name, one in model.named_modules() if hasattr(one, "fuse")]
    model.update_modules(tree_unflatten(fused))
    after = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert 0.9 <= fused_growth(tmp_path, tmp_path) / (after - before) <= 1.1


def test_a_model_that_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "llama", None)
    needed = estimate_memory(tmp_path, tmp_path, Context(8192, CHUNK))
    # The work would be measured again, on a machine that may be busy.
    monkeypatch.setattr(memory_check, "estimate_memory", lambda *_: needed)
    monkeypatch.setattr(memory_check, "read_total_memory", lambda: needed.total)
    assert check_memory(tmp_path, tmp_path, Context(8192, CHUNK)) is None
    limit = needed.weights + needed.cache // 2 + needed.work
    monkeypatch.setattr(memory_check, "read_total_memory", lambda: limit)
    parts = ["K/V entries of 8,192 tokens", "--drafter lookup with --kv-bits 8"]
    parts += ["--drafter lookup with a context of 4,096 tokens", "a copy of the model in 8 bits"]
    with pytest.raises(ResourceError) as refused:
        check_memory(tmp_path, tmp_path, Context(8192, CHUNK))
    assert [part for part in [*parts, "\n"] if part in str(refused.value)] == parts

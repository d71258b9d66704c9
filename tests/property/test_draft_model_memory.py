"""A draft model's levels copy no K/V buffer, and its memory does not grow with levels x context."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_redrafter import stream_generate
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from tests.helpers.models import tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3
ROWS = 2**14
LAYER_BYTES = 2 * HEADS * ROWS * HEAD_SIZE * 4  # keys and values of one layer: 2 MiB


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(layers=LAYERS)


def _long_cache(capacity: int, length: int) -> list[KVCache]:
    cache = [KVCache() for _ in range(LAYERS)]
    for layer in cache:
        layer.keys = mx.zeros((1, HEADS, capacity, HEAD_SIZE))
        layer.values = mx.zeros((1, HEADS, capacity, HEAD_SIZE))
        layer.offset = length
        mx.eval(layer.keys, layer.values)
    return cache


def _peak(model: nn.Module, beam_length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes in use at the peak of some steps after a long context of the draft model's alone."""
    monkeypatch.setattr(draft_model, "check_ids", lambda *_: None)
    cache = _long_cache(512, 3) + _long_cache(ROWS, ROWS - 1024)
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        [1, 2, 3],
        drafter=DraftModel(model, None),
        max_tokens=90,
        prompt_cache=cache,
        beam_width=2,
        beam_length=beam_length,
        tree_nodes=2 * beam_length,
    )
    for _ in range(20):
        next(responses)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(30):
        next(responses)
    peak = int(mx.get_peak_memory())
    responses.close()
    return peak - before


def test_levels_copy_no_buffer(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    _peak(model, 3, monkeypatch)  # compile what will be compiled
    few, many = (_peak(model, length, monkeypatch) for length in (3, 13))
    # Ten levels more. One copy of a layer's rows a level would be 21 MB, of all layers 63 MB; the
    # scores of two beams over all rows, with so small heads, are a quarter of a layer's rows.
    assert many - few < 2 * LAYER_BYTES
    assert many < 3 * LAYER_BYTES

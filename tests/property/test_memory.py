"""Decoding never copies the K/V buffers, however large they are.

Axes: N nodes of a tree.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter import stream_generate
from tests.helpers.memory import filled_cache, peak_of_steps
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3
SMALL, LARGE = 512, 2**17  # rows
BUFFER_BYTES = HEADS * LARGE * HEAD_SIZE * 4  # keys or values of one layer: 8 MiB


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(layers=LAYERS)


def _peak_of_decoding(model: nn.Module, capacity: int, **options: Any) -> int:
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        [1, 2, 3],
        max_tokens=40,
        prompt_cache=filled_cache(LAYERS, HEADS, HEAD_SIZE, capacity, length=3),
        **{"drafter": None, **options},
    )
    with closing(responses):
        return peak_of_steps(responses, first=3)  # the prompt and two steps


@pytest.mark.parametrize(
    "shape",
    [{"tree_nodes": 9}, {"beam_width": 8, "tree_nodes": 32}, {"select": "beam"}],
    ids=str,
)
def test_drafted_decoding_copies_no_buffer(model: nn.Module, shape: dict[str, Any]) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32)
    _peak_of_decoding(model, SMALL, drafter=drafter, **shape)  # compile what will be compiled
    small, large = (
        _peak_of_decoding(model, capacity, drafter=drafter, **shape) for capacity in (SMALL, LARGE)
    )
    assert large - small < BUFFER_BYTES // 8
    assert large < BUFFER_BYTES // 2


def test_plain_decoding_copies_no_buffer(model: nn.Module) -> None:
    large = _peak_of_decoding(model, LARGE)
    assert large < BUFFER_BYTES // 2


def test_prefill_makes_logits_for_the_last_token_alone(model: nn.Module) -> None:
    """The logits of a whole chunk would be the largest array by far."""
    vocab_size, tokens = 50_000, 400
    wide = tiny_llama(vocab_size=vocab_size, layers=1)
    tokenizer = wrapped_tokenizer(vocab_size)
    prompt = [5] * tokens

    def prefill() -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        list(stream_generate(wide, tokenizer, prompt, drafter=None, max_tokens=1))
        return int(mx.get_peak_memory()) - before

    prefill()
    assert prefill() < tokens * vocab_size * 4 // 4  # a quarter of them

"""Levels of networks with K/V rows copy no buffer: memory does not grow with levels x context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import mlx.nn as nn
import pytest

from mlx_redrafter import stream_generate
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from tests.helpers.memory import filled_cache, peak_of_steps
from tests.helpers.models import tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3
ROWS = 2**14
LAYER_BYTES = 2 * HEADS * ROWS * HEAD_SIZE * 4  # keys and values of one layer: 2 MiB


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(layers=LAYERS)


def _head() -> Eagle:
    config = EagleConfig(
        version=3,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=LAYERS,
        captured_layers=(0, 1, 2),
    )
    return Eagle(config)


DRAFTERS: dict[str, Callable[[nn.Module], Any]] = {
    "a draft model": lambda model: DraftModel(model, None),
    "an EAGLE head": lambda model: _head(),
}


def _peak(model: nn.Module, drafter: Any, beam_length: int) -> int:
    """Bytes in use at the peak of some steps after a long context of the drafter's alone."""
    short, long = (
        filled_cache(LAYERS, HEADS, HEAD_SIZE, capacity, length)
        for capacity, length in ((512, 3), (ROWS, ROWS - 1024))
    )
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        [1, 2, 3],
        drafter=drafter,
        max_tokens=90,
        prompt_cache=short + long,
        beam_width=2,
        beam_length=beam_length,
        tree_nodes=2 * beam_length,
    )
    with closing(responses):
        return peak_of_steps(responses, first=8, steps=10)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_levels_copy_no_buffer(
    kind: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "check_ids", lambda *_: None)
    drafter = DRAFTERS[kind](model)
    _peak(model, drafter, 3)  # compile what will be compiled
    few, many = (_peak(model, drafter, length) for length in (3, 13))
    # Ten levels more. One copy of a layer's rows a level would be 21 MB, of all layers 63 MB; the
    # scores of two beams over all rows, with so small heads, are a quarter of a layer's rows.
    assert many - few < 2 * LAYER_BYTES
    assert many < 3 * LAYER_BYTES

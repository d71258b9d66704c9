"""A draft model's levels copy no K/V buffer, and its memory does not grow with levels x context."""

from __future__ import annotations

from contextlib import closing

import mlx.nn as nn
import pytest

from mlx_redrafter import stream_generate
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from tests.helpers.memory import filled_cache, peak_of_steps
from tests.helpers.models import tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3
ROWS = 2**14
LAYER_BYTES = 2 * HEADS * ROWS * HEAD_SIZE * 4  # keys and values of one layer: 2 MiB


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(layers=LAYERS)


def _peak(model: nn.Module, beam_length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes in use at the peak of some steps after a long context of the draft model's alone."""
    monkeypatch.setattr(draft_model, "check_ids", lambda *_: None)
    short, long = (
        filled_cache(LAYERS, HEADS, HEAD_SIZE, capacity, length)
        for capacity, length in ((512, 3), (ROWS, ROWS - 1024))
    )
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        [1, 2, 3],
        drafter=DraftModel(model, None),
        max_tokens=90,
        prompt_cache=short + long,
        beam_width=2,
        beam_length=beam_length,
        tree_nodes=2 * beam_length,
    )
    with closing(responses):
        return peak_of_steps(responses, first=20)


def test_levels_copy_no_buffer(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    _peak(model, 3, monkeypatch)  # compile what will be compiled
    few, many = (_peak(model, length, monkeypatch) for length in (3, 13))
    # Ten levels more. One copy of a layer's rows a level would be 21 MB, of all layers 63 MB; the
    # scores of two beams over all rows, with so small heads, are a quarter of a layer's rows.
    assert many - few < 2 * LAYER_BYTES
    assert many < 3 * LAYER_BYTES

"""Decoding never copies the K/V buffers, however large they are, and nor do levels of drafts."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from tests.helpers.equality import stream, tokens
from tests.helpers.memory import peak_of, peak_of_steps
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3
SMALL, LARGE = 512, 2**17  # rows
BUFFER_BYTES = HEADS * LARGE * HEAD_SIZE * 4  # keys or values of one layer: 8 MiB
ROWS = 2**14
LAYER_BYTES = 2 * HEADS * ROWS * HEAD_SIZE * 4  # keys and values of one layer: 2 MiB


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(layers=LAYERS)


def _cache(capacity: int, length: int = 3) -> list[Any]:
    """Make a cache with room for ``capacity`` tokens that holds ``length`` rows of zeros."""
    cache = [KVCache() for _ in range(LAYERS)]
    for layer in cache:
        layer.keys, layer.values = (mx.zeros((1, HEADS, capacity, HEAD_SIZE)) for _ in range(2))
        layer.offset = length
        mx.eval(layer.keys, layer.values)
    return cache


def _peak_of_decoding(model: nn.Module, capacity: int, drafter: Any = None, **shape: Any) -> int:
    options = {"max_tokens": 40, "prompt_cache": _cache(capacity), **shape}
    with closing(stream(model, [1, 2, 3], drafter, **options)) as responses:
        return peak_of_steps(responses, first=3)  # the prompt and two steps


@pytest.mark.parametrize(
    "shape", [{"tree_nodes": 9}, {"beam_width": 8, "tree_nodes": 32}, {"select": "beam"}], ids=str
)
def test_drafted_decoding_copies_no_buffer(model, shape):
    drafter = random_drafter(VOCAB_SIZE, 32)
    _peak_of_decoding(model, SMALL, drafter, **shape)  # compile what will be compiled
    small, large = (_peak_of_decoding(model, size, drafter, **shape) for size in (SMALL, LARGE))
    assert large - small < BUFFER_BYTES // 8
    assert large < BUFFER_BYTES // 2


def test_plain_decoding_copies_no_buffer(model):
    assert _peak_of_decoding(model, LARGE) < BUFFER_BYTES // 2


def test_prefill_makes_logits_for_the_last_token_alone():
    """The logits of a whole chunk would be the largest array by far."""
    vocab_size, count = 50_000, 400
    wide = tiny_llama(vocab_size=vocab_size, layers=1)
    mx.clear_cache()
    peak = peak_of(lambda: tokens(wide, [5] * count, max_tokens=1), repeats=2)
    assert peak < count * vocab_size * 4 // 4  # a quarter of them


def _head() -> Eagle:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "vocab_size": VOCAB_SIZE}
    return Eagle(EagleConfig(version=3, captured_layers=(0, 1, 2), **sizes, **heads))


DRAFTERS: dict[str, Callable[[nn.Module], Any]] = {
    "a draft model": lambda model: DraftModel(model, wrapped_tokenizer(VOCAB_SIZE)),
    "an EAGLE head": lambda model: _head(),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_levels_copy_no_buffer(kind, model):
    """Memory of networks with K/V rows does not grow with levels x context."""
    drafter = DRAFTERS[kind](model)

    def peak(length: int) -> int:
        """Bytes in use at the peak of some steps after a long context of the drafter's alone."""
        shape = {"beam_width": 2, "beam_length": length, "tree_nodes": 2 * length}
        options = {"max_tokens": 90, "prompt_cache": _cache(SMALL) + _cache(ROWS, ROWS - 1024)}
        with closing(stream(model, [1, 2, 3], drafter, **options, **shape)) as responses:
            return peak_of_steps(responses, first=8, steps=10)

    peak(3)  # compile what will be compiled
    few, many = peak(3), peak(13)
    # Ten levels more. One copy of a layer's rows a level would be 21 MB, of all layers 63 MB; the
    # scores of two beams over all rows, with so small heads, are a quarter of a layer's rows.
    assert many - few < 2 * LAYER_BYTES
    assert many < 3 * LAYER_BYTES

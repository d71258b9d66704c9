"""How many shapes attention has while the default path of MLX's CUDA back end decodes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from mlx_redrafter import Engine, load
from mlx_redrafter.target.few_shapes import BUCKET, bucket
from tests.helpers.few_shapes import use_few_shapes

PROMPTS = ["Once upon a time there was a small dragon", "The capital of France is"]
# Bounds of the number of shapes, of which MLX keeps 256.
MAX_FIXED, MAX_DEFAULT = 5, 24


@given(st.integers(1, 10**6))
def test_buckets_waste_little(length: int) -> None:
    entries = bucket(length)
    assert length <= entries < length + max(BUCKET, length / 8)
    assert entries % BUCKET == 0
    assert bucket(entries) == entries


def test_buckets_are_few() -> None:
    assert len({bucket(length) for length in range(1, 2049)}) == 8
    assert len({bucket(length) for length in range(2049, 16_385)}) == 24


class Attention:
    """MLX's attention, counting the shapes of what verifies trees."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.shapes: set[tuple[Any, ...]] = set()
        self.masks: list[mx.array] = []
        self._stock = mx.fast.scaled_dot_product_attention
        patch.setattr(mx.fast, "scaled_dot_product_attention", self)

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        mask = options.get("mask")
        if q.shape[2] > 1 and isinstance(mask, mx.array):
            self.shapes.add((q.shape, k.shape, mask.shape, mask.dtype))
            if not any(mask is one for one in self.masks):
                self.masks.append(mask)
        return self._stock(q, k, v, **options)


@pytest.mark.parametrize(
    ("shape", "num_texts", "most"),
    [({"beam_width": 1, "beam_length": 5}, 1, MAX_FIXED), ({}, len(PROMPTS), MAX_DEFAULT)],
)
def test_a_text_has_few_shapes(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, int], num_texts: int, most: int
) -> None:
    use_few_shapes(monkeypatch, BUCKET)
    model, tokenizer, drafter = load()
    engine = Engine(model, tokenizer, drafter)
    attention = Attention(monkeypatch)
    num_steps = 0
    for prompt in PROMPTS[:num_texts]:
        tokens = tokenizer.encode(prompt)
        *_, last = found = list(engine.stream(tokens, max_tokens=120, **shape))
        stock = generate_step(mx.array(tokens), model, max_tokens=len(found))
        assert [response.token for response in found] == [int(token) for token, _ in stock]
        num_steps += last.stats.steps
    assert num_steps > 50
    assert 1 <= len(attention.shapes) <= most
    assert all(dtype == mx.float32 for *_, dtype in attention.shapes)
    # One mask per step, which all layers share.
    assert len(attention.masks) <= num_steps

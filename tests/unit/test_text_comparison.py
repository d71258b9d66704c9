"""The comparison that users run on their own models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine import engine, text_comparison
from mlx_redrafter.engine.text_comparison import Difference, compare_decoding
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
PROMPT = [5, 17, 3]


class WrongAt(SequenceDecoder):
    """Changes the token at one position of drafted text."""

    position = 0

    def take(self) -> list[Token]:
        tokens = super().take()
        index = self.position - self.delivery.stats.num_tokens
        if self.drafting is not None and 0 <= index < len(tokens):
            wrong = (tokens[index].id + 1) % VOCAB_SIZE
            tokens[index] = tokens[index]._replace(id=wrong)
        return tokens


def test_equal_texts_up_to_a_stop_token() -> None:
    model, drafter = tiny_llama(), random_drafter(VOCAB_SIZE, 32)
    tokens = ids(stock_tokens(model, PROMPT, 20))
    for options, stops in (({}, {tokens[4]}), ({"temp": 1.0, "seed": 2}, set())):
        tokenizer = wrapped_tokenizer(VOCAB_SIZE, stops)
        found = compare_decoding(model, tokenizer, drafter, PROMPT, 20, **options)
        end = tokens.index(tokens[4]) + 1 if stops else 20
        assert (found.num_tokens, found.difference) == (end, None)
        assert found.tokens_per_step is not None
        assert found.tokens_per_step >= 1


@pytest.mark.parametrize("position", [0, 3, 11])
def test_first_difference(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = tiny_llama(), random_drafter(VOCAB_SIZE, 32)
    expected = stock_tokens(model, PROMPT, 12)
    monkeypatch.setattr(
        engine, "SequenceDecoder", type("Wrong", (WrongAt,), {"position": position})
    )
    found = compare_decoding(model, wrapped_tokenizer(VOCAB_SIZE), drafter, PROMPT, 12)
    difference = found.difference
    assert difference is not None
    token, log_probs = expected[position]
    assert (difference.position, difference.expected) == (position, token)
    assert difference.found == (token + 1) % VOCAB_SIZE
    best = mx.sort(log_probs)
    gap: Any = (best[-1] - best[-2]).item()
    assert difference.gap == pytest.approx(gap)


def test_a_text_that_ends_early_differs_at_its_end() -> None:
    row, difference = mx.array([0.0, -1.5, -9.0]), text_comparison._first_difference
    assert difference([(1, row), (2, row)], [1]) == Difference(1, expected=2, found=None, gap=1.5)
    assert difference([(1, row)], [1, 2]) == Difference(1, expected=None, found=2, gap=1.5)

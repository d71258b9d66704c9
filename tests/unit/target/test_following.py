"""Passes that are dispatched before the host has read the path before them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.target import Target, TargetOutputs
from tests.helpers.few_shapes import compile_passes
from tests.models.tiny_models import build, main_rope, tiny_config
from tests.models.trees import PLAN, PROMPT, DraftsOnDevice, Followed, rows_of

# Largest difference of entries from those of plain decoding, relative to the largest.
TOLERANCE = 1e-4
# Tokens of a text.
NUM_TOKENS = 40


def begin(
    target: Target,
    drafts: DraftsOnDevice | None,
    cache: list[Any] | None = None,
    stop: int | None = None,
    **params: Any,
) -> SequenceDecoder:
    request = Request(
        PROMPT,
        frozenset() if stop is None else frozenset({stop}),
        max_tokens=params.pop("max_tokens", NUM_TOKENS),
        keeps_cache=True,
    )
    return SequenceDecoder(
        target,
        target.caches.new(cache),
        KeyedSampler(SamplingParams(**params), target.vocab_size),
        request,
        drafts,
        None if drafts is None else FixedPolicy(PLAN),
    )


def text_of(sequence: SequenceDecoder) -> list[int]:
    return [token.id for token in decode(sequence)]


@pytest.mark.parametrize(
    ("model_type", "is_chain"),
    [("llama", True), ("llama", False), ("gemma3_text", False), ("falcon_h1", False)],
)
def test_texts_and_caches_are_those_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, model_type: str, is_chain: bool
) -> None:
    """At every end: by length, by a stop token inside a path, and by the caller."""
    compile_passes(monkeypatch, uses=1)
    target = Target(build(tiny_config(model_type, main_rope(model_type))))
    followed = Followed(monkeypatch)
    for temp in (0.0, 1.0):
        text = text_of(begin(target, None, temp=temp, seed=3))
        for number, end in enumerate((NUM_TOKENS, 23, 22, 21)):
            stop, first = text[end - 1], text.index(text[end - 1]) + 1
            options: dict[str, Any] = {"stop": stop} if number % 2 else {"max_tokens": end}
            caches = [make_prompt_cache(target.model) for _ in range(2)]
            drafts = DraftsOnDevice([*PROMPT, *text], is_chain)
            sequences = [
                begin(target, one, cache, temp=temp, seed=3, **options)
                for one, cache in zip((None, drafts), caches, strict=True)
            ]
            expected = text[: first if number % 2 else end]
            assert [text_of(one) for one in sequences] == [expected, expected]
            check_caches(*caches)
    assert followed.count > 30


def test_a_caller_leaves_at_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches then hold what the caller has taken, though a later pass is in flight."""
    compile_passes(monkeypatch, uses=1)
    target = Target(build(tiny_config("qwen3_5", main_rope("qwen3_5"))))
    text = text_of(begin(target, None))
    for count in range(6, 12):
        caches = [make_prompt_cache(target.model) for _ in range(2)]
        plain = begin(target, None, caches[0], max_tokens=count)
        drafted = begin(target, DraftsOnDevice([*PROMPT, *text], False), caches[1])
        with closing(decode(drafted)) as tokens:
            found = [next(tokens).id for _ in range(count)]
        assert found == text_of(plain)
        check_caches(*caches)


def test_nan_after_a_path_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the error and after the tokens of plain decoding."""
    compile_passes(monkeypatch, uses=1)
    target = Target(build(tiny_config("llama", main_rope("llama"))))
    text = text_of(begin(target, None))
    first = next(i for i in range(12, 40) if text[i] not in {*PROMPT, *text[:i]})
    followed, compute = Followed(monkeypatch), Target.compute

    def compute_nan(self: Target, tokens: mx.array, *others: Any) -> TargetOutputs:
        is_bad, found = (tokens == text[first])[..., None], compute(self, tokens, *others)
        return found._replace(logits=mx.where(is_bad, mx.nan, found.logits))

    monkeypatch.setattr(Target, "compute", compute_nan)
    for drafts in (None, DraftsOnDevice([*PROMPT, *text], is_chain=False)):
        tokens = decode(begin(target, drafts))
        found: list[int] = []
        while len(found) <= first:
            found.append(next(tokens).id)
        assert found == text[: first + 1]
        with pytest.raises(NonFiniteError, match="in the text"):
            next(tokens)
    assert followed.count > 2


def check_caches(expected: list[Any], found: list[Any]) -> None:
    for wanted, layer in zip(expected, found, strict=True):
        for rows, own in zip(rows_of(wanted), rows_of(layer), strict=True):
            assert rows.shape == own.shape
            assert mx.max(mx.abs(rows - own)) <= TOLERANCE * mx.max(mx.abs(rows))

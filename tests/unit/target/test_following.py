"""Passes that are dispatched before the host has read the path before them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding.decode import decode
from mlx_redrafter.decoding.records import PendingPass, Request
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.few_shapes import compile_passes
from tests.models.tiny_models import VOCAB_SIZE, build, main_rope, tiny_config
from tests.models.trees import PLAN, PROMPT, rows_of

# Largest difference of entries from those of plain decoding, relative to the largest.
TOLERANCE = 1e-4
NUM_TOKENS = 40
LENGTH = PLAN.shape.length


class DraftsOnDevice:
    """Drafts of a known text that are right for 0, 1, 2 ... tokens in turn, made on the device.

    Args:
        text: The text, prompt included.
        is_chain: Whether drafts form a chain; else every draft comes after a wrong sibling.
    """

    reader = None

    def __init__(self, text: list[int], is_chain: bool):
        self.text = mx.array([*text, *[0] * (2 * LENGTH)])
        self.is_chain = is_chain
        self.num_drafted = 0

    def outlook(self) -> None:
        """There is always something to propose."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        num_right = self.num_drafted % LENGTH
        self.num_drafted += 1
        depths = mx.arange(1, LENGTH)
        # The root stands at this position, the drafts after it.
        root = flight.length + flight.num_accepted + 1
        drafts = self.text[root + depths] + (depths > num_right)
        if self.is_chain:
            tokens = mx.concatenate([flight.root, drafts % VOCAB_SIZE])
            return TokenTree.chain(tokens, LENGTH).scored(mx.zeros((LENGTH - 1,)))
        siblings = mx.stack([drafts + 17, drafts], axis=1).reshape(-1) % VOCAB_SIZE
        parents = [0, *(2 * ((node - 1) // 2) for node in range(1, 2 * LENGTH - 1))]
        shape = TokenTree.of([0] * len(parents), parents)
        tree = TokenTree(
            mx.concatenate([flight.root, siblings]),
            shape.parents,
            shape.depths,
            shape.ancestors,
            len(parents),
            len(parents),
            LENGTH - 1,
        )
        return tree.scored(mx.zeros((len(parents) - 1,)))

    def skip(self, flight: PendingPass) -> None:
        """Nothing to note."""

    def settle(self, length: int) -> None:
        """Nothing to settle."""


class Followed:
    """Counts the paths that caches follow, and checks that nobody had read them."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.count = 0
        follow = SequenceDecoder._follow

        def count(sequence: SequenceDecoder) -> bool:
            follows = follow(sequence)
            self.count += follows
            assert not (follows and sequence._pending.is_read)
            return follows

        patch.setattr(SequenceDecoder, "_follow", count)


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
        leave_as_stock=True,
    )
    return SequenceDecoder(
        target,
        target.new_cache(cache),
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
    """The caches hold what the caller has taken, though a later pass is in flight."""
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
    followed, call = Followed(monkeypatch), Target.call

    def call_with_nan(self: Target, tokens: mx.array, caches: Any) -> mx.array:
        is_bad = (tokens == text[first])[..., None]
        return mx.where(is_bad, mx.nan, call(self, tokens, caches))

    monkeypatch.setattr(Target, "call", call_with_nan)
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

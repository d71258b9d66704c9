"""Trees made by hand, and what stock mlx-lm says about their nodes."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.decoding.delivery import Request
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import Lane
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import Quantisation, SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import captured
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from tests.models.tiny_models import THRESHOLD, VOCAB_SIZE

# The root lies before the threshold, the deepest nodes behind it.
PROMPT = [7, 3, 50, 22, 91, 4, 18, 33, 64, 5, 77, 12]
assert len(PROMPT) < THRESHOLD - 1

DRAFT_LENGTH = 5
PLAN = DraftPlan.of(2, DRAFT_LENGTH + 1, 1 + 2 * DRAFT_LENGTH)
GREEDY = SamplingParams()

# Branches at three depths, and siblings apart from each other.
PARENTS = [0, 0, 0, 1, 1, 2, 3, 3, 6, 8, 5]


def branching_tree() -> TokenTree:
    """A tree of 11 nodes and depth 5."""
    return TokenTree.of([11, 40, 41, 8, 95, 8, 60, 61, 2, 70, 30], PARENTS)


def chain(length: int) -> TokenTree:
    """Make a tree with one branch."""
    tokens = [5 * node % VOCAB_SIZE for node in range(length)]
    return TokenTree.of(tokens, [max(node - 1, 0) for node in range(length)])


def wide_tree(num_nodes: int) -> TokenTree:
    """A tree whose nodes have up to three children."""
    parents = [0] + [(node - 1) // 3 for node in range(1, num_nodes)]
    return TokenTree.of([(node * 7 + 5) % VOCAB_SIZE for node in range(num_nodes)], parents)


def verify_after_prompt(
    target: Target, tree: TokenTree, quantisation: Quantisation | None = None
) -> TargetOutputs:
    """Verify a tree whose root follows `PROMPT`."""
    cache = target.caches.new(quantisation=quantisation)
    prefill(target, mx.array(PROMPT), cache, 2048)
    return target.verify(tree, cache)


def decode_paths(
    model: nn.Module, tree: TokenTree, quantisation: Quantisation | None = None
) -> TargetOutputs:
    """The outputs after every node when stock mlx-lm decodes the node's path token by token.

    Nodes continue from a copy of their parent's cache, so stock mlx-lm reads every node once.
    The hidden states are those of hooked models; others have none.
    """
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    cache = make_prompt_cache(model)
    read_by_stock(model, PROMPT[:-1], cache, quantisation)
    read_by_stock(model, PROMPT[-1:], cache, quantisation)
    caches: list[list[Any]] = []
    logits: list[mx.array] = []
    hidden_states: list[mx.array] = []
    for node, token in enumerate(tokens):
        own = copy.deepcopy(caches[parents[node]] if node else cache)
        with captured() as outputs:
            logits.append(read_by_stock(model, [token], own, quantisation))
        hidden_states.append(outputs[-1][0, -1] if outputs else mx.zeros((0,)))
        caches.append(own)
    return TargetOutputs(mx.stack(logits), mx.stack(hidden_states))


def read_by_stock(
    model: nn.Module, tokens: list[int], cache: list[Any], quantisation: Quantisation | None
) -> mx.array:
    """The logits after some tokens, shape (V,), whose rows are quantised as mlx-lm does it."""
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    if quantisation is not None:
        how = quantisation
        maybe_quantize_kv_cache(cache, how.start, how.group_size, how.bits)
    return logits


def rows_of(cache: Any) -> tuple[mx.array, ...]:
    """The keys and values of the tokens that a stock cache holds, in the order of the text.

    Of a cache with a state, its arrays; of one made of several, those of each.
    """
    if isinstance(cache, CacheList):
        return tuple(rows for part in cache.caches for rows in rows_of(part))
    if isinstance(cache, ArraysCache):
        return tuple(cache.cache)
    keys, values = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(keys), cache._temporal_order(values)
        return keys[..., -cache.size() :, :], values[..., -cache.size() :, :]
    if isinstance(cache, ChunkedKVCache):  # which may hold more than any token sees
        end = cache.offset - cache.start_position
        rows = slice(end - min(cache.offset, cache.chunk_size), end)
        return keys[..., rows, :], values[..., rows, :]
    return keys[..., : cache.offset, :], values[..., : cache.offset, :]


def sequence_of(
    target: Target,
    prompt: list[int],
    drafts: Any = None,
    params: SamplingParams = GREEDY,
    cache: TreeCache | None = None,
    **request: Any,
) -> SequenceDecoder:
    """Open a text, with these drafts around `PLAN` if there are any."""
    sampler = KeyedSampler(params, target.vocab_size)
    policy = None if drafts is None else FixedPolicy(PLAN)
    own = target.caches.new() if cache is None else cache
    return SequenceDecoder(target, own, sampler, Request(prompt, **request), drafts, policy)


def step_together(scheduler: Scheduler) -> Iterator[tuple[SequenceDecoder, list[int]]]:
    """Make one step of texts, and yield their new tokens; texts that have ended leave."""
    for text in scheduler.step_all():
        yield text, [token.id for token in text.delivery.deliver(text.take())]
        if text.is_finished or text.is_cancelled:
            scheduler.leave(text)
            text.close()


class DraftsOnDevice:
    """Drafts of a text with its prompt, made on the device, right for 0, 1, 2 ... in turn.

    In trees that are no chains every draft comes after a wrong sibling, so that accepted nodes are
    not the first ones.
    """

    reader = None

    def __init__(self, text: list[int], is_chain: bool = False):
        self.text = mx.array([*text, *[0] * (2 * (DRAFT_LENGTH + 1))])
        self.is_chain = is_chain
        self.num_drafted = 0

    def matches(self, least: float) -> None:
        """There is always something to propose."""

    def skip(self, flight: Pass) -> None:
        """Nothing to note."""

    def trim_to(self, length: int) -> None:
        """Nothing to trim."""

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        num_right = self.num_drafted % (DRAFT_LENGTH + 1)
        self.num_drafted += 1
        depths = mx.arange(1, DRAFT_LENGTH + 1)
        # The root stands at this position, the drafts after it.
        root = flight.length + flight.num_accepted + 1
        drafts = self.text[mx.minimum(root + depths, self.text.size - 1)] + (depths > num_right)
        vocab_size = flight.results.log_probs.shape[-1]  # MLX reads any memory for a token beyond
        if self.is_chain:
            tokens = mx.concatenate([flight.root, drafts % vocab_size])
            return TokenTree.chain(tokens)
        siblings = mx.stack([drafts + 17, drafts], axis=1).reshape(-1) % vocab_size
        parents = [0, *(2 * ((node - 1) // 2) for node in range(1, 2 * DRAFT_LENGTH + 1))]
        tokens = mx.concatenate([flight.root, siblings])
        return replace(TokenTree.of([0] * len(parents), parents), tokens=tokens)


class Followed:
    """Counts the paths that caches follow, and checks that nobody had read them."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.count = 0
        follow = Lane.follow

        def count(lane: Lane, sequence: SequenceDecoder, tree: TokenTree) -> bool:
            follows = follow(lane, sequence, tree)
            self.count += follows
            assert not (follows and sequence.last.is_read)
            return follows

        patch.setattr(Lane, "follow", count)

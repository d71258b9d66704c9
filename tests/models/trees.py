"""Trees made by hand, and what stock mlx-lm says about their nodes."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.config import SamplingParams, TreeShape
from mlx_redrafter.decoding.sampling import KeyedChooser
from mlx_redrafter.decoding.text import Decoder, InFlight, Proposal
from mlx_redrafter.host import to_ints
from mlx_redrafter.policy.adaptive import FixedPolicy
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import captured_output
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.tree import TokenTree, ancestor_mask
from tests.helpers.models import random_drafter
from tests.models.tiny_models import THRESHOLD, VOCAB_SIZE

# The root lies before the threshold, the deepest nodes behind it.
PROMPT = [7, 3, 50, 22, 91, 4, 18, 33, 64, 5, 77, 12]
assert len(PROMPT) < THRESHOLD - 1

DRAFT_LENGTH = 5

# Branches at three depths, and siblings apart from each other.
PARENTS = [0, 0, 0, 1, 1, 2, 3, 3, 6, 8, 5]


def make_tree(tokens: list[int], parents: list[int]) -> TokenTree:
    """A tree without padding; parents come before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    parent_array = mx.array(parents, dtype=mx.int32)
    return TokenTree(
        tokens=mx.array(tokens, dtype=mx.int32),
        parents=parent_array,
        depths=mx.array(depths, dtype=mx.int32),
        ancestors=ancestor_mask(parent_array, max(depths)),
        num_nodes=len(tokens),
        num_unmerged=len(tokens),
    )


def branching_tree() -> TokenTree:
    """A tree of 11 nodes and depth 5."""
    return make_tree([11, 40, 41, 8, 95, 8, 60, 61, 2, 70, 30], PARENTS)


def wide_tree(num_nodes: int) -> TokenTree:
    """A tree whose nodes have up to three children."""
    parents = [0] + [(node - 1) // 3 for node in range(1, num_nodes)]
    return make_tree([(node * 7 + 5) % VOCAB_SIZE for node in range(num_nodes)], parents)


def verify_after_prompt(target: Target, tree: TokenTree) -> TargetOutputs:
    """Verify a tree whose root follows `PROMPT`."""
    cache = target.new_cache()
    target.prefill(mx.array(PROMPT), cache, 2048, lambda done, total: None)
    return target.verify(tree, cache)


def decode_paths(model: nn.Module, tree: TokenTree) -> TargetOutputs:
    """The outputs after every node when stock mlx-lm decodes the node's path token by token.

    The hidden states are those of hooked models; others have none.
    """
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    leaves = set(range(len(tokens))) - set(parents[1:])
    logits: dict[int, mx.array] = {}
    hiddens: dict[int, mx.array] = {}
    for leaf in leaves:
        path = [leaf]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        cache = make_prompt_cache(model)
        model(mx.array([PROMPT[:-1]]), cache=cache)
        model(mx.array([PROMPT[-1:]]), cache=cache)
        for node in path:
            with captured_output() as outputs:
                logits[node] = model(mx.array([[tokens[node]]]), cache=cache)[0, -1]
            hiddens[node] = outputs[-1][0, -1] if outputs else mx.zeros((0,))
    nodes = range(len(tokens))
    return TargetOutputs(
        mx.stack([logits[n] for n in nodes]), mx.stack([hiddens[n] for n in nodes])
    )


def stock_tokens(model: nn.Module, num_tokens: int, cache: list[KVCache]) -> list[int]:
    """What stock mlx-lm generates after `PROMPT`, greedily."""
    steps = generate_step(mx.array(PROMPT), model, max_tokens=num_tokens, prompt_cache=cache)
    return [int(token) for token, _ in steps]


class ScriptedDecoder(Decoder):
    """A decoder whose drafts are right for 0, 1, ... 4 tokens in turn, then wrong.

    Args:
        target: The model.
        cache: Its cache.
        stock: Its tokens, from which drafts are made.
    """

    def __init__(self, target: Target, cache: TreeCache, stock: list[int]):
        shape = TreeShape(beam_width=2, beam_length=DRAFT_LENGTH + 1)
        chooser = KeyedChooser(SamplingParams(), target.vocab_size)
        unused = random_drafter(target.vocab_size, target.hidden_size)
        super().__init__(target, cache, chooser, unused, FixedPolicy(shape))
        self.stock = stock
        self.num_known = 0
        self.num_drafted = 0

    def _draft(self, shape: TreeShape, flight: InFlight) -> Proposal:
        num_accepted = to_ints(flight.outcome)[0]
        self.num_known += num_accepted + 1
        num_right = self.num_drafted % DRAFT_LENGTH
        self.num_drafted += 1
        (root,) = to_ints(flight.root)
        tree = scripted_tree(root, self.stock[self.num_known :], num_right)
        return Proposal(shape, tree, noise=None)


def scripted_tree(root: int, coming: list[int], num_right: int) -> TokenTree:
    """A tree in which ``num_right`` drafts are right, with wrong siblings, then wrong ones."""
    tokens, parents, last = [root], [0], 0
    for depth in range(DRAFT_LENGTH):
        draft = coming[depth] if depth < len(coming) else 0
        if depth >= num_right:
            draft = (draft + 1) % VOCAB_SIZE
        # The wrong sibling comes first, so that accepted nodes are not the first ones.
        tokens += [(draft + 17) % VOCAB_SIZE, draft]
        parents += [last, last]
        last = len(tokens) - 1
    return make_tree(tokens, parents)

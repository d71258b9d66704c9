"""Lookup: drafts from what the model has computed already, without a network.

Two sources make one tree, the most probable drafts first:

- tokens that followed the newest ones earlier, in the prompt, the text or texts before it (prompt
  lookup: arXiv 2304.04487 and apoorvumang/prompt-lookup-decoding);
- tokens that the target found most probable after the same last three, two or one tokens, at any
  node that it has verified (Token Recycling, arXiv 2408.08696).

With a temperature, the target's own noise is added to what it found probable: the result is what it
draws if its distribution is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checks import check_instance, check_vocabulary, token_ids
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Drafting, Group, JointDrafting, Proposer, StateReader
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.kind import Wrapper
from mlx_redrafter.proposers.lookup.chances import Chances
from mlx_redrafter.proposers.lookup.contexts import NUM_BEST, Contexts, following
from mlx_redrafter.proposers.lookup.draft_tree import LEAST_PROBABILITY, DraftTree
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import NO_TOKEN, Drafts, TokenTree

# Drafts to foresee if none are in flight.
FORESEEN = DraftPlan(DraftShape(4, 16), 17, from_text=True)
# Minimum probability of a draft that may pay, for a policy that chooses from the drafts.
LEAST_PAYING = 0.02


class Lookup:
    """Lookup in what the model has read and computed, as `Proposer`.

    Its sequence indexes the token ids of earlier requests, ``history``, when it begins, or adds to
    the ``contexts`` of earlier texts.
    """

    num_layers = 0
    num_rows: int | None = None
    max_length: int | None = None
    networks: tuple[nn.Module, ...] = ()

    def __init__(self, history: Sequence[Sequence[int]] = ()):
        check_instance("history", history, (list, tuple), "a list of texts' token ids")
        self.history = [token_ids("history[...]", tokens) for tokens in history]
        self.chances = Chances()
        self.contexts: Contexts | None = None

    def after(self, history: Sequence[Sequence[int]] | Contexts) -> Lookup:
        """Return a lookup in more earlier requests that shares the chances of this one."""
        other = copy(self)
        if isinstance(history, Contexts):
            other.contexts = history
        else:
            other.history = [*self.history, *Lookup(history).history]
        return other

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Raise `ConfigError` unless the target has all tokens of the history."""
        for tokens in self.history:
            check_vocabulary("history token ids", tokens, target.vocab_size)
        if self.contexts is not None:
            self.contexts.check_fit(target.vocab_size)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupDrafting:
        history = (token for text in self.history for token in (*text, NO_TOKEN))
        contexts = self.contexts or Contexts(history)
        contexts.expect(prompt, target.vocab_size)
        num_best = NUM_BEST if target.vocab_size > NUM_BEST else 0
        return LookupDrafting(contexts, self.chances, num_best, couple_noise)


class LookupFirst(Wrapper):
    """Prompt lookup for plans that are ``from_text``, and a network for all others."""

    def __init__(self, lookup: Lookup, network: Proposer):
        super().__init__(network)
        self._lookup = lookup

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupDrafting:
        drafting = self._lookup.open(target, prompt, couple_noise, [])
        drafting.network = self.proposer.open(target, prompt, couple_noise, cached)
        drafting.most_best = 0
        # K/V entries of a network are those of its own drafts.
        drafting.may_merge = self.proposer.num_layers == 0
        return drafting


@dataclass(eq=False)
class LookupDrafting:
    """Drafts of one sequence.

    The first call of a method indexes the prompt, not the constructor, so that sequences that wait
    for their turn cost nothing.

    Attributes:
        contexts: Contexts of the texts that the host has read.
        most_best: K, the number of candidates after each node; 0 for none.
        couple: Whether the target's noise is added to what it found probable.
        network: Drafts for plans that are not ``from_text``; None to look up for all plans.
        may_merge: Whether the target may verify other drafts beside those of the network.
    """

    contexts: Contexts
    chances: Chances
    most_best: int = 0
    couple: bool = True
    network: Drafting | None = None
    may_merge: bool = False
    # The newest pass, until the next call reads its tokens: the host has waited for it by then.
    _flight: Pass | None = field(default=None, init=False)
    # Drafts after the newest token that the host has read, and whether that was one before.
    _tree: DraftTree | None = field(default=None, init=False)
    _is_draft: bool = field(default=True, init=False)
    # Whether a draft may pay at present; while none can, no candidates are found on the device.
    _may_pay: bool = field(default=True, init=False)

    @property
    def num_best(self) -> int:
        return self.most_best if self._may_pay else 0

    @property
    def reader(self) -> StateReader | None:
        return None if self.network is None else self.network.reader

    def matches(self, least: float) -> list[float]:
        """Return probabilities of the most probable drafts after the token in flight.

        If that token is no draft of the tree, there are as many as usual after such a token.
        """
        self._may_pay = least <= 1
        self._read()
        if not self._may_pay:
            return []
        return (self._tree or self._grow(FORESEEN, None, least)).foresee(self.chances.surprised)

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Propose after a pass; the host waits for it, unless the network drafts."""
        self._read(flight)
        if self.network is not None and not plan.from_text:
            tree = self.network.propose(flight, plan, noise)
            if tree is None or not self.may_merge:
                return tree
            # The noise of the target's choices is known after nodes of these depths only.
            length = FORESEEN.shape.length if noise is None else plan.shape.length
            return replace(tree, find_others=partial(self._find, length))
        if noise is not None and self.couple:
            mx.async_eval(noise.values)  # behind the pass, so that no other wait is for them
        self._read()
        tree = self._grow(plan, noise if self.couple else None).build(flight.tokens[-1])
        if self.network is not None:
            self.network.skip(flight)
        return tree

    def propose_all(
        self, group: Group, plan: DraftPlan, noises: Sequence[GumbelNoise | None]
    ) -> list[TokenTree | None] | None:
        is_mixed = len({type(one.network) for one, _ in group}) > 1
        if is_mixed or plan.from_text or not isinstance(self.network, JointDrafting):
            return None
        networks = [(one.network, flight) for one, flight in group]
        trees = self.network.propose_all(networks, plan, noises)
        if trees is not None:
            for one, flight in group:
                one._read(flight)
        return trees

    def skip(self, flight: Pass) -> None:
        """Keep the pass for the next call; the host does not wait for it."""
        self._read(flight)
        if self.network is not None:
            self.network.skip(flight)

    def trim_to(self, length: int) -> None:
        """Learn from the newest pass, for the next turn of the conversation."""
        self._read()
        if self.network is not None:
            self.network.trim_to(length)

    def _find(self, length: int) -> Drafts:
        """Find drafts beside those of the network; the host has read the pass before them."""
        self._read()
        return self._grow(FORESEEN.within(length), None).drafts

    def _grow(self, plan: DraftPlan, noise: GumbelNoise | None, least: float = 0.0) -> DraftTree:
        """Find drafts after the newest token that the host has read."""
        self.contexts.index()
        least = max(least, LEAST_PAYING if plan.from_text else LEAST_PROBABILITY)
        self._tree = tree = DraftTree(self.contexts, self.chances, plan, noise, least)
        if not self._is_draft:
            self.chances.note_surprise(tree.probabilities)
        return tree

    def _read(self, newest: Pass | None = None) -> None:
        """Learn from the pass that is kept, and keep another one."""
        flight, contexts, self._flight = self._flight, self.contexts, newest
        if flight is None:
            return
        tokens = flight.tokens
        if self._tree is not None:
            self._is_draft, self._tree = self._tree.learn(tokens), None
        best, size = array("i", flight.best), 2 * NUM_BEST
        rows = [best[start : start + size].tobytes() for start in range(0, len(best), size)]
        if not rows and not self._may_pay:
            contexts.expect(tokens)
            return
        contexts.index()
        if rows and flight.known is not None and flight.is_finite:
            keys = [contexts.end.key]
            for parent, token in zip(flight.known.parents, flight.known.tokens, strict=True):
                keys.append(following(keys[parent], token))
            for node, key in enumerate(keys):
                if node not in flight.rows:
                    contexts.teach(key, rows[node])
        # Logits that are NaN gave no last token: the text ends.
        for token, node in zip(tokens, flight.rows, strict=False):
            contexts.add(token, rows[node] if rows else None)

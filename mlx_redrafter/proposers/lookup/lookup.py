"""Lookup: drafts from what the model has computed already, without a network.

Two sources make one tree, the most probable drafts first:

- tokens that followed the newest ones earlier, in the prompt, the text or texts before it (prompt
  lookup: arXiv 2304.04487 and apoorvumang/prompt-lookup-decoding);
- tokens that the target itself found most probable after the same last three, two or one tokens,
  at any node that it has verified (Token Recycling, arXiv 2408.08696).

With a temperature, the target's own noise is added to what it found probable, as only the target's
own program can: the result is what it draws if its distribution is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checks import check_instance, check_vocabulary, token_ids
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.lookup.chances import Chances
from mlx_redrafter.proposers.lookup.contexts import NUM_BEST, Contexts, following
from mlx_redrafter.proposers.lookup.draft_tree import LEAST_PROBABILITY, DraftTree
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree

# Drafts to foresee if none are in flight.
FORESEEN = DraftPlan(DraftShape(4, 16), 17, from_text=True)
# Minimum probability of a draft that may pay, for a policy that chooses from the drafts.
LEAST_PAYING = 0.02
# Bytes of a row of `Pass.best`.
_ROW = 8 * NUM_BEST


class Lookup:
    """Lookup in what the model has read and computed, as `Proposer`.

    Args:
        history: Token ids of earlier requests to look in as well; a sequence indexes them when it
            begins.

    Attributes:
        contexts: Contexts of earlier texts, which its sequence adds to; None to begin without.
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

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupDrafting:
        contexts = self.contexts
        if contexts is None:
            contexts = Contexts([token for text in self.history for token in (*text, NO_TOKEN)])
        contexts.expect(prompt)
        num_best = NUM_BEST if target.vocab_size > NUM_BEST else 0
        return LookupDrafting(contexts, self.chances, num_best, couple_noise)


class LookupDrafting:
    """Drafts of one sequence.

    The first call of a method indexes the prompt, not the constructor, so that sequences that wait
    for their turn cost nothing.

    Attributes:
        contexts: Contexts of the texts that the host has read.
    """

    reader = None

    def __init__(
        self, contexts: Contexts, chances: Chances, num_best: int = 0, couple: bool = True
    ):
        self.contexts = contexts
        self.num_best = num_best
        self._couple = couple
        self._chances = chances
        # The newest pass, until the next call reads its tokens: the host has waited for it by then.
        self._flight: Pass | None = None
        # Drafts after the newest token that the host has read, and whether that was one before.
        self._tree: DraftTree | None = None
        self._is_draft = True

    def matches(self) -> list[float]:
        """Return probabilities of the most probable drafts after the token in flight.

        If that token is no draft of the tree, there are as many as usual after such a token.
        """
        self._read()
        if self._tree is None:
            self._grow(FORESEEN, None)
        assert self._tree is not None
        return self._tree.foresee(self._chances.surprised)

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Propose after a pass, which the host waits for."""
        if noise is not None and self._couple:
            mx.async_eval(noise.values)  # behind the pass, so that no other wait is for them
        self.skip(flight)
        self._read()
        return self._grow(plan, noise if self._couple else None)

    def skip(self, flight: Pass) -> None:
        """Keep the pass for the next call; the host does not wait for it."""
        self._read()
        self._flight = flight

    def trim_to(self, length: int) -> None:
        """Learn from the newest pass, for the next turn of the conversation."""
        self._read()

    def _grow(self, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Build the tree after the newest token that the host has read."""
        self._tree = DraftTree(self.contexts, self._chances, noise)
        found = self._tree.grow(plan, LEAST_PAYING if plan.from_text else LEAST_PROBABILITY)
        if not self._is_draft:
            self._chances.note_surprise(self._tree.probabilities)
        return found

    def _read(self) -> None:
        """Learn from the newest pass."""
        flight, contexts, self._flight = self._flight, self.contexts, None
        contexts.index()
        if flight is None:
            return
        tokens = flight.tokens
        if len(tokens) < len(flight.rows):
            return  # logits that are NaN gave no token: the text ends
        if self._tree is not None:
            self._is_draft = self._tree.learn(tokens)
            self._tree = None
        best = array("i", flight.outcome.best).tobytes()
        rows = [best[start : start + _ROW] for start in range(0, len(best), _ROW)]
        if rows and flight.known is not None:
            _teach(contexts, flight, rows)
        for token, node in zip(tokens, flight.rows, strict=True):
            contexts.add(token, rows[node] if rows else None)


def _teach(contexts: Contexts, flight: Pass, rows: Sequence[bytes]) -> None:
    """Teach what was probable after the nodes that were not accepted."""
    assert flight.known is not None
    place, path = contexts.end.key, set(flight.rows)
    keys = [place]
    drafts = zip(flight.known.parents, flight.known.tokens, strict=True)
    for node, (parent, token) in enumerate(drafts, start=1):
        keys.append(following(keys[parent], token))
        if node not in path:
            contexts.teach(keys[node], rows[node])

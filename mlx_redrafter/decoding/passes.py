"""Forward passes of the target over one sequence: what was dispatched, and what came of it.

Axes: N nodes of the tree, L its levels, the root's included, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.decoding.records import NOT_A_TOKEN
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.trees.tree import Drafts


class Outcome(NamedTuple):
    """The outcome of a pass, as the host has read it.

    Attributes:
        rows: Node indices of the accepted path.
        tokens: Accepted drafts, and the bonus token if there is one.
        bonus: The target's own token after them, `NOT_A_NUMBER` or `NOT_A_TOKEN`.
        best: `best_rows` of the logits, of Z numbers; empty unless the drafting asks for them.
    """

    rows: Sequence[int]
    tokens: list[int]
    bonus: int
    best: list[int]


@dataclass(frozen=True, eq=False)
class Pass:
    """A dispatched forward pass, with its outcome as arrays that the device may still compute.

    Attributes:
        packed: Bonus token, `NOT_A_NUMBER` or `NOT_A_TOKEN`, and for a tree, number of accepted
            drafts, node indices and tokens of the path, int32, shape (1,) or (2 + 2 L + Z,). For
            one token, never `NOT_A_NUMBER`. The last Z numbers are those of `Outcome.best`.
        root: The bonus token, which is the next root, int32, shape (1,); a token in any case.
        hidden_state: Target state that predicted it, shape (H,).
        log_probs: Natural log-probabilities after the nodes, shape (N, V).
        states: States of the nodes that a `StateReader` asks for, shape (N, S); None without one.
        path: Accepted path, int32, shape (L,), junk after the accepted nodes; None for one token.
        read: Function that reads ``packed``, with `NOT_A_NUMBER`; None to read the array.
        num_nodes: Nodes verified; 0 for the prefill, which is no step.
        num_unmerged: Nodes as they would have been without merging.
        known: Drafts verified, if the host knows them without waiting; else None.
        length: Committed tokens before the root of this pass.
        plan: Plan of the drafts; None if nothing was drafted.
    """

    packed: mx.array
    root: mx.array
    hidden_state: mx.array
    log_probs: mx.array
    states: mx.array | None = None
    path: mx.array | None = None
    read: Callable[[], list[int]] | None = None
    num_nodes: int = 1
    num_unmerged: int = 1
    known: Drafts | None = None
    length: int = 0
    plan: DraftPlan | None = None

    @property
    def num_accepted(self) -> mx.array:
        """Number of accepted drafts, int32, shape (1,)."""
        return mx.zeros((1,), dtype=mx.int32) if self.path is None else self.packed[1:2]

    @property
    def max_accepted(self) -> int:
        """Maximum number of drafts that can be accepted."""
        return 0 if self.path is None else self.path.shape[0] - 1

    @property
    def path_tokens(self) -> mx.array:
        """Tokens of the accepted path, its root first, int32, shape (L,); junk after them.

        For a pass over one token, which accepts nothing, shape (1,) of junk.
        """
        if self.path is None:
            return self.packed
        length = self.path.shape[0]
        return self.packed[2 + length : 2 + 2 * length]

    @property
    def following_tokens(self) -> mx.array:
        """Tokens after each of the accepted path, the bonus token last, int32, shape (L,); junk
        after them, which are tokens in any case.
        """
        path = self.path_tokens
        is_last = mx.arange(path.shape[0]) == self.num_accepted
        following = mx.concatenate([path[1:], path[:1]])
        return mx.maximum(mx.where(is_last, self.root, following), 0)

    @property
    def path_states(self) -> mx.array:
        """States after the tokens of the accepted path, shape (L, S); junk after them."""
        assert self.states is not None
        return self.states if self.path is None else self.states[self.path]

    @property
    def is_read(self) -> bool:
        """Whether the host knows the outcome."""
        return "outcome" in self.__dict__

    @cached_property
    def outcome(self) -> Outcome:
        """The outcome; the first use waits for the device."""
        values = to_ints(self.packed) if self.read is None else self.read()
        bonus = values[0]
        own = [bonus] if bonus >= 0 else []
        if self.path is None:
            return Outcome((0,), own, bonus, values[1:])
        length, num_accepted = self.path.shape[0], values[1]
        tokens = values[3 + length : 3 + length + num_accepted] + own
        return Outcome(values[2 : 3 + num_accepted], tokens, bonus, values[2 + 2 * length :])

    @property
    def rows(self) -> Sequence[int]:
        """Node indices of the accepted path; waits for the device."""
        return self.outcome.rows

    @property
    def tokens(self) -> list[int]:
        """Accepted drafts and the bonus token, if there is one; waits for the device.

        Raises:
            NonFiniteError: There is no token, as the logits are NaN.
        """
        if not self.outcome.tokens:
            self.check_finite()
        return self.outcome.tokens

    @property
    def is_finite(self) -> bool:
        """Whether there is a bonus token; waits for the device."""
        return self.outcome.bonus >= 0

    def check_finite(self) -> None:
        """Raise an error unless there is a bonus token; waits for the device.

        Raises:
            ConfigError: The user's sampler has returned no token of the vocabulary.
            NonFiniteError: The logits are NaN.
        """
        if not self.is_finite:
            if self.outcome.bonus == NOT_A_TOKEN:
                size = self.log_probs.shape[-1]
                raise ConfigError(f"sampler must return token ids from 0 to {size - 1}")
            where = "in the text" if self.num_nodes else "after the prompt"
            raise NonFiniteError(
                f"the target's logits {where} are NaN; its weights are damaged, its dtype "
                "overflows (bfloat16 or float32 may not), or a logits processor left no token, or "
                "a grammar did, which is too complex or which a sampler has broken"
            )

"""Records of one sequence: the request, the forward pass in flight, and the tokens.

Axes: N nodes of the tree, L its levels, the root's included, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.trees.tree import Drafts

ProgressCallback = Callable[[int, int], None]

# Stands for the token after logits that are NaN. Padding nodes have another number, `NO_TOKEN`.
NOT_A_NUMBER = -2
# Stands for a token id of the user's sampler that is not in the vocabulary.
NOT_A_TOKEN = -3


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: Token ids, at least one.
        stop_tokens: Token ids that end the sequence.
        max_tokens: Maximum number of tokens to yield, -1 for no limit.
        prefill_step_size: Maximum number of prompt tokens per forward pass.
        chunk_size: Function that returns a smaller number, or not, for the prompt tokens
            processed so far; such a prompt shares no passes. None for none.
        on_progress: Callback for the prompt tokens processed and their number.
        leave_as_stock: Whether to leave the K/V cache and the random state as mlx-lm does, with
            the last token processed as well, which costs one more forward pass.
    """

    prompt: list[int]
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = -1
    prefill_step_size: int = 2048
    chunk_size: Callable[[int], int] | None = None
    on_progress: ProgressCallback = field(default=lambda done, total: None)
    leave_as_stock: bool = False

    def find_end(self, tokens: Sequence[int], num_before: int) -> tuple[str | None, int]:
        """Return why and after how many of these tokens decoding ends; (None, all) if not."""
        has_limit = self.max_tokens >= 0
        left = self.max_tokens - num_before if has_limit else len(tokens)
        for i, token in enumerate(tokens[:left]):
            if token in self.stop_tokens:
                return "stop", i + 1
        if has_limit and left <= len(tokens):
            return "length", left
        return None, len(tokens)


class Token(NamedTuple):
    """One token of the sequence.

    Attributes:
        id: Token id.
        is_draft: Whether it is an accepted draft, rather than the target's own addition.
        log_probs: Natural log-probabilities after logits processors, shape (V,).
        finish_reason: "stop" or "length" on the last token, else None.
    """

    id: int
    is_draft: bool
    log_probs: mx.array
    finish_reason: str | None


@dataclass
class PendingPass:
    """A dispatched forward pass of the target, with what is known of it so far.

    The target's answer is there from the start, though the device may still compute it. The
    decoder adds its place in the sequence, and what the sequence keeps of it.

    Attributes:
        outcome: Bonus token, `NOT_A_NUMBER` or `NOT_A_TOKEN`, and for a tree, number of accepted
            drafts, node indices and tokens of the path, int32, shape (1,) or (2 + 2 L + Z,). For
            one token, never `NOT_A_NUMBER`. The last Z numbers are those of ``best``.
        root: The bonus token, which is the next root, int32, shape (1,); a token in any case.
        hidden_state: Target state that predicted it, shape (H,).
        log_probs: Natural log-probabilities after the nodes, shape (N, V).
        states: States of the nodes that a `StateReader` asks for, shape (N, S); None without one.
        path: Accepted path, int32, shape (L,), junk after the accepted nodes; None for one token.
        read: Function that reads the outcome, with `NOT_A_NUMBER`; None to read the array.
        num_nodes: Nodes verified; 0 for the prefill, which is no step.
        num_unmerged: Nodes as they would have been without merging.
        known: Drafts verified, if the host knows them without waiting; else None.
        length: Committed tokens before the root of this pass.
        plan: Plan of the drafts; None if nothing was drafted.
        is_shown: Whether the proposer was given it.
        is_read: Whether the host knows the outcome.
        best: Once the outcome is read, `best_rows` of the logits, of Z numbers; empty unless the
            drafting asks for them.
        is_accepted: Whether its outcome is read and committed.
        num_kept: Tokens that belong to the sequence, once the pass is accepted; the sequence may
            end before the others.
        finish_reason: Reason that the sequence ends with them; None if it goes on.
    """

    outcome: mx.array
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
    is_shown: bool = False
    is_accepted: bool = False
    num_kept: int = 0
    finish_reason: str | None = None
    is_read: bool = False
    best: list[int] = field(default_factory=list)
    _bonus: int = NOT_A_NUMBER
    _rows: Sequence[int] = (0,)
    _tokens: list[int] = field(default_factory=list)

    @property
    def num_accepted(self) -> mx.array:
        """Number of accepted drafts, int32, shape (1,)."""
        return mx.zeros((1,), dtype=mx.int32) if self.path is None else self.outcome[1:2]

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
            return self.outcome
        length = self.path.shape[0]
        return self.outcome[2 + length : 2 + 2 * length]

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
    def rows(self) -> Sequence[int]:
        """Node indices of the accepted path; waits for the device."""
        if not self.is_read:
            self._wait()
        return self._rows

    @property
    def tokens(self) -> list[int]:
        """Accepted drafts and the bonus token, if there is one; waits for the device.

        Raises:
            NonFiniteError: There is no token, as the logits are NaN.
        """
        if not self.is_read:
            self._wait()
        if not self._tokens:
            self.check_finite()
        return self._tokens

    @property
    def kept_tokens(self) -> list[Token]:
        """Tokens that belong to the sequence, once the pass is accepted."""
        if self.path is None:  # `squeeze` costs the host less time than an index
            return [Token(self.tokens[0], False, self.log_probs.squeeze(0), self.finish_reason)]
        tokens, num_drafts = self.tokens[: self.num_kept], len(self.rows) - 1
        return [
            Token(
                id=token,
                is_draft=i < num_drafts,
                log_probs=self.log_probs[row],
                finish_reason=self.finish_reason if i == len(tokens) - 1 else None,
            )
            for i, (token, row) in enumerate(zip(tokens, self.rows, strict=False))
        ]

    @property
    def is_finite(self) -> bool:
        """Whether there is a bonus token; waits for the device."""
        if not self.is_read:
            self._wait()
        return self._bonus >= 0

    def check_finite(self) -> None:
        """Raise an error unless there is a bonus token; waits for the device.

        Raises:
            ConfigError: The user's sampler has returned no token of the vocabulary.
            NonFiniteError: The logits are NaN.
        """
        if not self.is_finite:
            if self._bonus == NOT_A_TOKEN:
                size = self.log_probs.shape[-1]
                raise ConfigError(f"sampler must return token ids from 0 to {size - 1}")
            where = "in the text" if self.num_nodes else "after the prompt"
            raise NonFiniteError(
                f"the target's logits {where} are NaN; its weights are damaged, its dtype "
                "overflows (bfloat16 or float32 may not), or a logits processor left no token, or "
                "a grammar did, which is too complex or which a sampler has broken"
            )

    def _wait(self) -> None:
        """Read the outcome."""
        values = to_ints(self.outcome) if self.read is None else self.read()
        bonus, end = values[0], 1
        if self.path is not None:
            length, num_accepted = self.path.shape[0], values[1]
            self._rows = values[2 : 3 + num_accepted]
            self._tokens = values[3 + length : 3 + length + num_accepted]
            end = 2 + 2 * length
        self.best = values[end:]
        if bonus >= 0:
            self._tokens.append(bonus)
        self._bonus = bonus
        self.is_read = True

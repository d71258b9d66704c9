"""Delivery of a sequence's tokens to its caller, with the counts and times of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from mlx_redrafter.decoding.clock import StepClock
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import DraftPolicy, Step
from mlx_redrafter.decoding.records import Request, Token
from mlx_redrafter.decoding.stats import DecodingStats


class Delivery:
    """The tokens that the caller of a sequence has taken.

    Args:
        on_close: Function called with the counts when the sequence ends, for whatever reason.

    Attributes:
        stats: Counts of steps and tokens.
        clock: Times of its steps.
        num_ready: Tokens that are yielded next without another step.
    """

    def __init__(self, on_close: Callable[[DecodingStats], None]):
        self.stats = DecodingStats()
        self.clock = StepClock()
        self.num_ready = 0
        self._on_close = on_close

    def deliver(self, tokens: Sequence[Token]) -> Iterator[Token]:
        """Yield tokens, and count them and the time that the caller spends with each."""
        for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
            self.num_ready = left
            self.stats.count_token()
            start = time.perf_counter()
            try:
                yield token
            finally:
                self.clock.leave_out(time.perf_counter() - start)

    def count(self, newest: Pass, request: Request, policy: DraftPolicy | None) -> None:
        """Count a pass that the host has read, and let the policy observe it."""
        if not newest.num_nodes:  # as in mlx-lm, the prompt is done with the first token
            request.on_progress(len(request.prompt), len(request.prompt))
            return
        num_accepted = len(newest.rows) - 1
        self.stats.count_step(num_accepted, newest.num_nodes, newest.num_unmerged)
        seconds = self.clock.lap()
        if policy is not None:
            policy.observe(Step(newest.plan, newest.num_nodes, newest.tokens, seconds))

    def close(self) -> None:
        """End the counts."""
        self._on_close(self.stats)

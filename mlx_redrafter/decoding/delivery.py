"""Tokens of a sequence on the way to its caller, and the counts and times of its steps.

Axes: V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import DraftPolicy, Step
from mlx_redrafter.draft_plan import DraftPlan

# Maximum share of a step's time that the caller may spend with a token. The device goes on
# meanwhile, so the time of a step with more is unknown.
MAX_ABSENCE = 0.1

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: Token ids, at least one.
        stop_tokens: Token ids that end the sequence.
        max_tokens: Maximum number of tokens to yield, -1 for no limit.
        ends_with_context: Whether that is the room in the target's context, not a given number.
        prefill_step_size: Maximum number of prompt tokens per forward pass.
        chunk_size: Function that returns a smaller number, or not, for the prompt tokens
            processed so far; such a prompt shares no passes. None for none.
        on_progress: Callback for the prompt tokens processed and their number.
        keeps_cache: Whether to leave the K/V cache and the random state as mlx-lm does, with
            the last token processed as well, which costs one more forward pass.
    """

    prompt: list[int]
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = -1
    ends_with_context: bool = False
    prefill_step_size: int = 2048
    chunk_size: Callable[[int], int] | None = None
    on_progress: ProgressCallback = field(default=lambda done, total: None)
    keeps_cache: bool = False


class Token(NamedTuple):
    """One token of the sequence.

    Attributes:
        id: Token id.
        is_draft: Whether it is an accepted draft, rather than the target's own addition.
        log_probs: Function that takes natural log-probabilities after logits processors, shape
            (V,), out of those of the pass.
        finish_reason: "stop" or "length" on the last token, else None.
    """

    id: int
    is_draft: bool
    log_probs: Callable[[], mx.array]
    finish_reason: str | None


class ShapeStats(NamedTuple):
    """The steps of one kind: their number, tokens and mean cost in seconds, measured and expected.

    The plan of their drafts has the number of nodes verified; None for plain decoding. Without a
    step the measured cost is the expected one.
    """

    plan: DraftPlan | None
    seconds: float
    steps: int
    tokens: int
    expected_seconds: float
    expected_tokens: float

    def __str__(self) -> str:
        name, steps = "plain", max(1, self.steps)
        if self.plan is not None:
            search = f"{self.plan.shape.width}x{self.plan.shape.length}"
            name = f"{'lookup' if self.plan.from_text else search}:{self.plan.num_nodes}"
        return (
            f"{name}, {self.steps} steps: {self.tokens / steps:.2f} "
            f"({self.expected_tokens / steps:.2f}) tokens, {1e3 * self.seconds:.1f} "
            f"({1e3 * self.expected_seconds:.1f}) ms"
        )


@dataclass
class DecodingStats:
    """Counts over the steps of one request. A step is one verify whose outcome is read.

    The first token comes from the prefill and belongs to no step.

    Attributes:
        num_tokens: Tokens yielded, stop token included.
        accepted_counts: Number of steps by accepted drafts: at index a, those that accepted a.
        num_verified: Nodes verified in all steps, roots included.
        shapes: Steps by kind, plain first, once the sequence has ended; empty with a fixed plan,
            and if all its steps were those of a batch.
    """

    num_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    num_verified: int = 0
    shapes: list[ShapeStats] = field(default_factory=list)

    def count_token(self) -> None:
        self.num_tokens += 1

    def count_step(self, num_accepted: int, num_verified: int) -> None:
        missing = num_accepted + 1 - len(self.accepted_counts)
        self.accepted_counts.extend([0] * missing)
        self.accepted_counts[num_accepted] += 1
        self.num_verified += num_verified

    @property
    def steps(self) -> int:
        return sum(self.accepted_counts)

    @property
    def num_accepted(self) -> int:
        return sum(depth * count for depth, count in enumerate(self.accepted_counts))

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens yielded per step without the first token; None before the first step.

        Mean acceptance length in vLLM's terms.
        """
        steps = self.steps
        return (self.num_tokens - 1) / steps if steps else None

    @property
    def acceptance_rate_by_depth(self) -> list[float]:
        """At index d - 1, the share of steps that accepted at least d drafts."""
        counts = self.accepted_counts
        return [sum(counts[depth:]) / self.steps for depth in range(1, len(counts))]


class Outbox:
    """Tokens of committed passes until they are taken, and then the reason that no others come.

    Attributes:
        end_of_prompt: Number of tokens before its first one.
        num_tokens: Number of all its tokens so far.
        num_cut: Number of tokens of the newest pass behind the end of the sequence.
        error: Reason why it cannot go on behind the tokens that are there; None if it can.
    """

    def __init__(self, request: Request, end_of_prompt: int):
        self._request = request
        self.end_of_prompt = end_of_prompt
        self.num_tokens = self.num_cut = 0
        self.error: BaseException | None = None
        self._tokens: list[Token] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take, neither tokens nor an error."""
        return not self._tokens and self.error is None

    @property
    def is_last_next(self) -> bool:
        return self.num_tokens + 1 == self._request.max_tokens

    def put(self, newest: Pass) -> bool:
        """Add the tokens of a pass that belong to the sequence; return whether it ends there."""
        rows, found = newest.rows, newest.tokens
        reason, count = find_end(self._request, found, self.num_tokens)
        self.num_tokens += count
        self.num_cut = len(found) - count
        for i, (token, row) in enumerate(zip(found[:count], rows, strict=False)):
            end = reason if i == count - 1 else None
            log_probs = newest.log_probs_after(row)
            self._tokens.append(Token(token, i < len(rows) - 1, log_probs, end))
        return reason is not None

    def fail(self, error: BaseException) -> None:
        self.error = error

    def take(self) -> list[Token]:
        """Return the tokens, and leave none; raise the error, if there are no tokens before it."""
        tokens, self._tokens = self._tokens, []
        if not tokens and self.error is not None:
            raise self.error
        return tokens


def find_end(request: Request, tokens: Sequence[int], num_before: int) -> tuple[str | None, int]:
    """Return why and after how many of these tokens decoding ends; (None, all) if not."""
    left = request.max_tokens - num_before if request.max_tokens >= 0 else len(tokens) + 1
    for i, token in enumerate(tokens[:left]):
        if token in request.stop_tokens:
            return "stop", i + 1
    if left <= len(tokens):
        return "length", left
    return None, len(tokens)


class StepClock:
    """Times steps, leaving out those that tell nothing of their kind.

    The caller kept the decoder waiting, or the step prepared what later ones use again.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        # Seconds that the caller has spent with tokens since the last outcome.
        self._away = 0.0

    def leave_out(self, seconds: float) -> None:
        self._away += seconds

    def skip(self) -> None:
        self._last = None

    def lap(self) -> float | None:
        """Return the seconds since the last call; None at first, after `skip` or a long absence."""
        now = time.perf_counter()
        last, self._last = self._last, now
        away, self._away = self._away, 0.0
        if last is None or away > MAX_ABSENCE * (now - last):
            return None
        return now - last


class Delivery:
    """The tokens that the caller of a sequence has taken, the times of its steps, and all counts.

    ``on_close`` gets the counts when the sequence ends, for whatever reason. ``num_ready`` tokens
    are yielded next without another step.
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
        self.stats.count_step(num_accepted, newest.num_nodes)
        seconds = self.clock.lap()
        if policy is not None:
            policy.observe(Step(newest.plan, newest.num_nodes, newest.tokens, seconds))

    def close(self) -> None:
        self._on_close(self.stats)

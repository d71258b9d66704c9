"""One sequence being decoded: where it stands, its passes, and its tokens that nobody has taken.

`decoding.step` decodes sequences, alone or several at once, and `decoding.prefill` processes their
prompts. This module leaves to them what depends on other sequences.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.delivery import DecodingStats, Delivery, Outbox, Request, Token
from mlx_redrafter.decoding.passes import (
    Part,
    Pass,
    Results,
    num_best_of,
    sample_and_accept,
    sample_roots,
)
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.protocols import Drafting, DraftPolicy
from mlx_redrafter.decoding.sampling import GumbelNoise, TokenSampler
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.caches.batch_cache import Slot
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import is_verifying
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree


class Status(IntEnum):
    """Place of a sequence between its prompt and its end."""

    # Its prompt, the last token left out, is not processed.
    WAITING = 0
    # Its newest pass is dispatched, or its first one comes next.
    RUNNING = 1
    # A pass is being built: an error now leaves its caches half-way.
    VERIFYING = 2
    # Its last token is known.
    FINISHED = 3
    # Its caches are the caller's again.
    CLOSED = 4


class Place(NamedTuple):
    """A cache for a sequence, and the policy that goes with it."""

    cache: TreeCache | Slot
    policy: DraftPolicy | None


class SequenceDecoder:
    """A sequence being decoded, with drafts or without; its tokens are the same.

    Without a drafting and a policy it is decoded plainly. ``on_close`` gets the counts at its end.

    Attributes:
        place: Its cache, which may be a slot of a batch, and its policy there.
        last: The newest pass.
        committed: The newest pass that is read and committed: `last` or the one before.
        is_cancelled: Whether it ends before its next step; any thread may set this.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        sampler: TokenSampler,
        request: Request,
        drafting: Drafting | None = None,
        policy: DraftPolicy | None = None,
        processors: ProcessorChain | None = None,
        on_close: Callable[[DecodingStats], None] = lambda stats: None,
    ):
        self.target = target
        self.sampler = sampler
        self.request = request
        self.drafting = drafting
        self.processors = processors
        self.place = self._own = Place(cache, policy)
        self.last: Pass | None = None
        self.committed: Pass | None = None
        # The newest pass that the drafting was given.
        self._seen: Pass | None = None
        self.outbox = Outbox(request, cache.length + len(request.prompt))
        self.delivery = Delivery(on_close)
        self.status = Status.WAITING
        self.is_cancelled = False

    @property
    def cache(self) -> TreeCache | Slot:
        return self.place.cache

    @property
    def policy(self) -> DraftPolicy | None:
        return self.place.policy

    @property
    def own_cache(self) -> TreeCache:
        """Its own cache, which is empty while it is in a batch."""
        assert isinstance(self._own.cache, TreeCache)
        return self._own.cache

    @property
    def is_finished(self) -> bool:
        """Whether its last token is known, or it was closed."""
        return self.status >= Status.FINISHED

    @property
    def is_closed(self) -> bool:
        """Whether its caches are the caller's again."""
        return self.status is Status.CLOSED

    @property
    def is_ready(self) -> bool:
        """Whether it has tokens, an error or its end to take without another step."""
        return not self.outbox.is_empty or self.is_cancelled or self.is_finished

    @property
    def layers(self) -> Sequence[int]:
        reader = None if self.drafting is None else self.drafting.reader
        return () if reader is None else reader.layers

    def enter(self, status: Status) -> None:
        self.status = status

    def move(self, slot: Slot | None, policy: DraftPolicy | None = None) -> None:
        """Continue in a slot of a batch with its policy there, or in the sequence's own cache."""
        self.place = self._own if slot is None else Place(slot, policy)

    def pass_for_drafts(self) -> Pass:
        assert self.last is not None
        self._seen = self.last
        return self.last

    def skip_drafts(self) -> None:
        """Give the drafting the newest pass, if it has not seen that, and ask for no drafts."""
        last = self.last
        if self.drafting is not None and last is not None and last is not self._seen:
            self.drafting.skip(last)
        self._seen = last

    def advance(self, root: mx.array) -> Results:
        """Process a root, shape (1,), in its own cache, and sample what follows."""
        return self.sample(root, self.target.advance(root, self.own_cache, self.layers), None)

    def sample(
        self, drafts: mx.array | TokenTree, outputs: TargetOutputs, noise: GumbelNoise | None
    ) -> Results:
        """Process logits and sample the target's tokens after a root or a tree; dispatch that."""
        if self.processors is not None:
            logits = self.processors.process_after(drafts, outputs.logits)
            outputs = outputs._replace(logits=logits)
        return self.choose(drafts, outputs, noise)

    def choose(
        self, drafts: mx.array | TokenTree, outputs: TargetOutputs, noise: GumbelNoise | None
    ) -> Results:
        """Do what `sample` does, with logits that are processed already."""
        num_best = num_best_of(self.drafting)
        if isinstance(drafts, TokenTree):
            return sample_and_accept(self.sampler, outputs, drafts, noise, num_best)
        # The token just processed, the last of the committed ones, is the root of this choice.
        noise = self.sampler.noise(self.cache.length - 1, 1)
        return sample_roots(self.sampler, outputs, noise, num_best)

    def push(self, found: Part, drafts: mx.array | TokenTree, plan: DraftPlan | None) -> None:
        """Make a dispatched pass over a root or tree the newest one, once that before is committed.

        A pass behind a path that turned out to end in NaN is dropped. The first one is committed at
        once: nothing is dispatched behind it, as to dispatch may mean to wait.
        """
        first, length = self.last is None, self.cache.length
        if isinstance(drafts, TokenTree):
            nodes, known = drafts.num_nodes, drafts.known
        else:  # the root is committed already
            nodes, known, length = 0 if first else 1, None, length - 1
        if self.last is None or self.last.is_finite:
            self.last = Pass(*found, nodes, known, length, plan)
        if self.status is Status.VERIFYING:
            self.status = Status.RUNNING
        if first:
            if self.drafting is not None and self.policy is not None:
                self.drafting.matches(self.policy.least_chance)  # it indexes the prompt meanwhile
            self.commit()

    def commit(self) -> None:
        """Read the newest pass, commit what it accepted, and put its tokens into the outbox.

        Logits that are NaN raise NonFiniteError.
        """
        last = self.last
        if last is None or last is self.committed:
            return
        rows, tokens = last.rows, last.tokens
        if last.has_path:
            self.cache.commit(rows)
            self.sampler.commit(len(rows))
            if self.processors is not None and len(rows) > 1:
                self.processors.extend(mx.array(tokens[: len(rows) - 1], dtype=mx.int32))
        self.delivery.count(last, self.request, self.policy)
        self.committed = last
        if self.outbox.put(last):
            self.status = Status.FINISHED

    def take(self) -> list[Token]:
        """Take the tokens, or the error, out of the outbox."""
        return self.outbox.take()

    def cancel(self) -> None:
        """End the sequence before its next step or chunk of the prompt; from any thread."""
        self.is_cancelled = True

    def fail(self) -> None:
        """Give up the drafts after an error: their caches may be half-way."""
        self.drafting = None

    def close(self) -> None:
        """End the sequence; with ``keeps_cache`` the caches hold what the caller has taken."""
        is_whole, self.status = self.status is not Status.VERIFYING, Status.FINISHED
        self.delivery.close()
        try:
            if self.request.keeps_cache:
                self._trim_to(self.delivery.stats.num_tokens, is_whole)
        finally:
            self.status = Status.CLOSED

    def _trim_to(self, num_taken: int, is_whole: bool) -> None:
        """Leave the caches with the prompt and the first ``num_taken`` tokens.

        Unless ``is_whole``, the caches may hold a part of an interrupted pass.
        """
        last, is_committed = self.last, self.last is self.committed
        # A cache holds the K/V entry of the root of a tree in flight beyond the committed ones.
        has_root = last is not None and last.has_path and not is_committed
        try:
            # A stream that is garbage may be closed amid another one's pass.
            if last is not None and is_whole and not is_verifying():
                is_all = is_committed and num_taken == self.outbox.num_tokens
                with mx.stream(generation_stream):
                    if is_committed:
                        self.skip_drafts()
                    # Process the last token, and leave the random state of plain decoding.
                    if is_all and self.outbox.num_cut == 0:
                        self.advance(last.root)
                    else:
                        self.sampler.go_back(num_taken + 1)
        finally:
            # After an interruption the cache may lack entries of tokens that were taken.
            length = min(self.outbox.end_of_prompt + num_taken, self.cache.length + has_root)
            self.own_cache.trim_to(length)
        if self.drafting is not None:
            self.drafting.trim_to(length)


def attempt(do: Callable[[SequenceDecoder], object], sequence: SequenceDecoder) -> None:
    """Call a function for a sequence, whose outbox gets its error."""
    try:
        do(sequence)
    except BaseException as error:
        fail([sequence], error)


def fail(sequences: Iterable[SequenceDecoder], error: BaseException) -> None:
    """Give an error to sequences that it may leave half-way; raise it if it is Ctrl-C or the like.

    A panic of a library that is written in Rust, such as llguidance, is no `Exception`.
    """
    for one in sequences:
        one.outbox.fail(error)
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error

"""One text: draft, verify, accept, commit, step by step.

Axes: N nodes of the tree, H hidden size, V vocabulary.

The host reads the outcome of a step while the device drafts the next one (in plain decoding, while
it computes the next token), so the device is not idle for a read, and the length of every forward
pass is a number that the host knows. A policy that looks at a draft's probabilities before it
decides how much of it is verified waits for the draft, too, and a proposer that looks up the text
waits for the outcome: then the device is idle while the host builds the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.clock import StepClock
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.protocols import Drafting, DraftPolicy, Proposal, Step
from mlx_redrafter.decoding.records import PendingPass, Request, Token
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedChooser, TokenChooser
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.decoding.verdict import TargetChoice, judge_root, judge_tree
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.caches.batch_cache import SlotCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree


class _Cancelled(Exception):
    """Ends the processing of a prompt."""


class PassRequest(NamedTuple):
    """What the target is to process for a text.

    Attributes:
        drafts: Root, shape (1,), or tree.
        noise: Noise of the choices after a tree.
    """

    drafts: mx.array | TokenTree
    noise: GumbelNoise | None = None


T = TypeVar("T")
# A step as it goes: it yields what the target is to process, and is sent the outputs, or the
# verdict on them; None before it waits for the device. It returns the tokens of the step.
Processing = Generator[PassRequest | None, TargetOutputs | TargetChoice | None, T]


class SequenceDecoder:
    """One text being decoded, with drafts or without; its tokens are the same.

    Args:
        target: The model whose text it is.
        cache: The text's K/V cache.
        chooser: Chooses the target's tokens.
        request: The prompt and where to end.
        drafting: Proposes tokens; None for plain decoding.
        policy: Says how much is drafted, step by step; None for plain decoding.
        processors: Logits processors and their history.

    Attributes:
        on_close: Function called when the text ends, however it does.
        num_ready: Tokens that `decode` can yield without another step.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache | SlotCache,
        chooser: TokenChooser,
        request: Request,
        drafting: Drafting | None = None,
        policy: DraftPolicy | None = None,
        processors: ProcessorChain | None = None,
    ):
        self.target = target
        self.cache = cache
        self.chooser = chooser
        self.request = request
        self.drafting = drafting
        self.policy = policy
        self.processors = processors
        self.on_close: Callable[[], None] = lambda: None
        self.num_ready = 0
        self.clock = StepClock()
        self.stats = DecodingStats()
        self.is_finished = self.is_cancelled = self.is_closed = False
        self._end_of_prompt = cache.length + len(request.prompt)
        # Tokens of all steps so far, and of the last one, those beyond the end of the text.
        self._num_tokens = self._num_cut = 0
        # The newest forward pass, whether its outcome is read and nothing follows it yet, and
        # whether the proposer was told of it.
        self._flight: PendingPass | None = None
        self._has_begun = self._is_read = False
        self._is_told = True

    def step(self) -> list[Token]:
        """Decode one step: the accepted drafts and the target's own token after them.

        The first step is the prompt, which yields one token.

        Raises:
            NonFiniteError: The logits after the text so far are NaN.
        """
        return self._process(self.steps())

    def steps(self) -> Processing[list[Token]]:
        """The same for a batch, whose texts share their forward passes."""
        if self._flight is None:
            # Nothing that comes after the first token delays it: to dispatch may mean to wait.
            self.begin()
            if self.is_finished:
                return []
            last = mx.array(self.request.prompt[-1:], dtype=mx.int32)
            self._flight = yield from self._advance(last, num_nodes=0)
            if self.drafting is not None:
                self.drafting.outlook()  # a lookup indexes the prompt while the device is busy
            yield None
            self._is_read, self._is_told = True, False
            return self._accept(self._flight)
        if self._is_read:
            self._flight.check_finite()  # it may have accepted drafts before
            self._is_read, self._is_told = False, True
            proposal = self._draft(self._choose(), self._flight)
            self._flight = yield from self._verify(proposal, self._flight)
        flight, plan = self._flight, self._choose()
        if plan is None and flight.path is None:
            # From one token to the next: the length is known before the outcome is.
            if self._needs_next:
                self._flight = yield from self._advance(flight.root)
            yield None
            tokens = self._accept(flight)
            self._skip(flight)
        elif flight.path is None and self.policy is not None and self.policy.only_looks:
            # As well, as the next pass does not depend on the drafts.
            proposal = self._draft(plan, flight)
            self._flight = yield from self._advance(flight.root, plan)
            yield None
            tokens = self._accept(flight)
            self._keep(proposal)
        else:
            proposal = self._draft(plan, flight)
            yield None
            tokens = self._accept(flight)
            if not self.is_finished and flight.is_finite:
                self._flight = yield from self._verify(proposal, flight)
        self._is_read = self._flight is flight
        return tokens

    def begin(self) -> None:
        """Process the prompt but for its last token, the first part of the first step.

        What others have processed with theirs, and is in the cache, is left out. A text that has
        begun is at rest: its first token may come from a pass shared with others. A text that is
        cancelled meanwhile is finished.
        """
        if self._has_begun:
            return
        self._has_begun, request = True, self.request
        done = self.own_cache.length + len(request.prompt) - self._end_of_prompt
        with mx.stream(generation_stream):
            try:
                self.target.prefill_but_last(
                    mx.array(request.prompt[done:], dtype=mx.int32),
                    self.own_cache,
                    request.prefill_step_size,
                    self._on_progress,
                    self.layers,
                    self._read_states,
                )
            except _Cancelled:
                self.is_finished = True

    def land(self) -> list[Token]:
        """Come to rest, for a move to other caches: read the pass in flight; nothing follows it.

        Returns:
            The tokens of that pass; none where it is read already, as after the prompt.

        Raises:
            NonFiniteError: The logits after the text so far are NaN.
        """
        tokens: list[Token] = []
        if self._flight is not None and not self._is_read:
            tokens = self._accept(self._flight)
            self._is_read, self._is_told = True, False
        if isinstance(self.cache, TreeCache):
            with mx.stream(generation_stream):
                self.cache.settle(self.cache.length)
        return tokens

    def cancel(self) -> None:
        """End the text before its next step or chunk of the prompt; any thread may ask for it."""
        self.is_cancelled = True

    def close(self, num_taken: int) -> None:
        """End the text; with ``leave_as_stock`` the caches hold what the caller has taken.

        Args:
            num_taken: Number of tokens that the caller has taken.
        """
        self.is_finished = True
        self.on_close()
        try:
            if self.request.leave_as_stock:
                self._settle(num_taken)
        finally:
            self.is_closed = True

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the target whose states the drafting reads."""
        reader = None if self.drafting is None else self.drafting.reader
        return () if reader is None else reader.layers

    @property
    def begins_with_others(self) -> bool:
        """Whether its prompt may be processed with those of others."""
        return self.own_cache.length == 0 and len(self.request.prompt) > 1 and not self.layers

    @property
    def common_chooser(self) -> KeyedChooser | None:
        """What chooses where a batch may judge texts together; None where only the text can."""
        is_alone = self.processors is not None or not isinstance(self.chooser, KeyedChooser)
        return None if is_alone else cast(KeyedChooser, self.chooser)

    @property
    def own_cache(self) -> TreeCache:
        """The cache of a text that is in no batch."""
        assert isinstance(self.cache, TreeCache)
        return self.cache

    @property
    def _needs_next(self) -> bool:
        """Whether the token in flight is processed, too."""
        return self.request.leave_as_stock or self._num_tokens + 1 != self.request.max_tokens

    def _process(self, processing: Processing[T]) -> T:
        """Process what is asked for, for this text alone."""
        outputs = None
        while True:
            try:
                wanted = processing.send(outputs)
            except StopIteration as end:
                result: T = end.value
                return result
            outputs = None
            if wanted is not None:
                drafts, cache = wanted.drafts, self.own_cache
                with mx.stream(generation_stream):
                    if isinstance(drafts, TokenTree):
                        outputs = self.target.verify(drafts, cache, self.layers)
                    else:
                        outputs = self.target.advance(drafts, cache, self.layers)

    def _choose(self) -> DraftPlan | None:
        is_last = self._num_tokens + 1 == self.request.max_tokens
        if is_last or self.policy is None or self.drafting is None:
            return None
        return self.policy.choose(self.drafting.outlook())

    def _keep(self, proposal: Proposal | None) -> TokenTree | None:
        """Let the policy find the drafts that are worth verifying, if there are any."""
        if self.policy is None or proposal is None or proposal.tree is None:
            return None
        with mx.stream(generation_stream):
            return self.policy.keep(proposal.plan, proposal.tree)

    def _read_states(self, states: mx.array) -> None:
        if self.drafting is not None and self.drafting.reader is not None:
            self.drafting.reader.read(states)

    def _on_progress(self, done: int, total: int) -> None:
        if self.is_cancelled:
            raise _Cancelled
        self.request.on_progress(done, total)

    def _advance(
        self, root: mx.array, plan: DraftPlan | None = None, num_nodes: int = 1
    ) -> Processing[PendingPass]:
        """Process a token alone, as plain decoding does: the root, or the end of the prompt."""
        answer = yield PassRequest(root)
        assert answer is not None
        if isinstance(answer, TargetOutputs):
            with mx.stream(generation_stream):
                if self.processors is not None and num_nodes:  # which know the prompt
                    self.processors.extend(root)
                answer = self._judge_root(answer)
        return answer.of_root(self.cache.length, num_nodes=num_nodes, plan=plan)

    def _judge_root(self, outputs: TargetOutputs) -> TargetChoice:
        if self.processors is not None:
            outputs = outputs._replace(logits=self.processors.process(outputs.logits))
        # The token just processed, the last of the committed ones, is the root of this choice.
        noise = self.chooser.noise_of_root(self.cache.length - 1)
        return judge_root(self.chooser, outputs, noise)

    def _draft(self, plan: DraftPlan | None, flight: PendingPass) -> Proposal | None:
        """Dispatch the drafts of what may follow a pass, or let the proposer take note of it."""
        if plan is None or self.drafting is None:
            self._skip(flight)
            return None
        if plan.num_nodes == 1:  # a probe, which shows all drafts of its search
            plan = replace(plan, num_nodes=plan.shape.max_nodes)
        with mx.stream(generation_stream):
            accepted = flight.num_accepted, flight.most_accepted
            noise = self.chooser.noise(flight.length + 1, plan.shape.length, *accepted)
            tree = self.drafting.propose(flight, plan, noise)
            if tree is not None and tree.known is None:
                mx.async_eval(tree.arrays)
        return Proposal(plan, tree, noise)

    def _skip(self, flight: PendingPass) -> None:
        if self.drafting is not None:
            with mx.stream(generation_stream):
                self.drafting.skip(flight)

    def _verify(self, proposal: Proposal | None, flight: PendingPass) -> Processing[PendingPass]:
        """Process the drafts that the policy finds worth it, or the root alone."""
        tree = self._keep(proposal)
        if proposal is None or tree is None or tree.size == 1 or not self.cache.takes(tree):
            return (yield from self._advance(flight.root, proposal and proposal.plan))
        plan = proposal.plan
        answer = yield PassRequest(tree, proposal.noise)
        assert answer is not None
        if isinstance(answer, TargetOutputs):
            answer = self._judge_tree(answer, tree, proposal.noise)
        return answer.of_tree(self.cache.length, tree, plan)

    def _judge_tree(
        self, outputs: TargetOutputs, tree: TokenTree, noise: GumbelNoise | None
    ) -> TargetChoice:
        with mx.stream(generation_stream):
            if self.processors is not None:
                self.processors.extend(tree.tokens[:1])
                logits = self.processors.process_tree(outputs.logits, tree)
                outputs = outputs._replace(logits=logits)
            return judge_tree(self.chooser, outputs, tree, noise)

    def _accept(self, flight: PendingPass) -> list[Token]:
        """Wait for a forward pass, commit what it accepted, and cut it where the text ends."""
        rows, tokens = flight.rows, flight.tokens
        num_accepted = len(rows) - 1
        if flight.path is not None:
            with mx.stream(generation_stream):
                self.cache.commit(rows)
                self.chooser.commit(len(rows))
            if self.processors is not None and num_accepted:
                self.processors.extend(mx.array(tokens[:num_accepted], dtype=mx.int32))
        self._count(flight, num_accepted)
        finish_reason, kept = self.request.find_end(tokens, self._num_tokens)
        self.is_finished = finish_reason is not None
        self._num_tokens += kept
        self._num_cut = len(tokens) - kept
        return [
            Token(
                id=token,
                is_draft=i < num_accepted,
                log_probs=flight.log_probs_after(row),
                finish_reason=finish_reason if i == kept - 1 else None,
            )
            for i, (token, row) in enumerate(zip(tokens[:kept], rows[:kept], strict=True))
        ]

    def _count(self, flight: PendingPass, num_accepted: int) -> None:
        if not flight.num_nodes:  # as in mlx-lm, the prompt is done with the first token
            self.request.on_progress(len(self.request.prompt), len(self.request.prompt))
            return
        self.stats.count_step(num_accepted, flight.num_nodes, flight.num_unmerged)
        seconds = self.clock.lap()
        if self.policy is not None:
            self.policy.observe(Step(flight.plan, flight.num_nodes, flight.tokens, seconds))

    def _settle(self, num_taken: int) -> None:
        try:
            if self._is_read and self._flight is not None:
                if not self._is_told:
                    self._skip(self._flight)
                if num_taken == self._num_tokens:
                    self._catch_up(self._flight)
        finally:
            # The row of the root of a tree in flight is there. An interruption may leave less.
            flight = None if self._is_read else self._flight
            num_rows = self.cache.length + (flight is not None and flight.path is not None)
            length = min(self._end_of_prompt + num_taken, num_rows)
            self.own_cache.settle(length)
        if self.drafting is not None:
            self.drafting.settle(length)

    def _catch_up(self, flight: PendingPass) -> None:
        """Process the last token, and leave the random state where plain decoding has it."""
        if self._num_cut == 0:
            self._process(self._advance(flight.root))
        else:
            self.chooser.commit(len(flight.tokens) - self._num_cut + 1)

"""One sequence, decoded step by step: draft, ask, answer, take.

    sequence.draft()           # dispatch drafts of what may follow the pass in flight
    drafts = sequence.ask()    # what the target processes next: a root or a tree
    sequence.answer(chosen)    # the target's tokens after it, which is the pass in flight now
    tokens = sequence.take()   # those of the pass before: wait, commit, cut at the end

Axes: N nodes of the tree, H hidden size, V vocabulary.

The host reads the outcome of a pass while the device drafts what follows it, or computes the next
token in plain decoding. If the target has a compiled pass for the drafts, the host dispatches that
first, and reads the outcome while the device verifies what follows it. So the device is not idle
for a read. If a policy reads the probabilities of the drafts before it decides how many to verify,
or a lookup waits for the outcome, the device is idle while the host builds the next pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.clock import StepClock
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.protocols import (
    Drafting,
    DraftPolicy,
    Offer,
    Recycling,
    Step,
    Wish,
)
from mlx_redrafter.decoding.records import PendingPass, Request, Token
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler, TokenSampler
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.decoding.target_choice import sample_and_accept, sample_root
from mlx_redrafter.device_read import wait_for
from mlx_redrafter.target.caches.batch_cache import Slot
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree


class SequenceDecoder:
    """A sequence being decoded, with drafts or without; its tokens are the same.

    Args:
        target: The model that decodes it.
        cache: The sequence's K/V cache.
        sampler: Sampler of the target's tokens.
        request: The prompt, and where to end.
        drafting: Proposes tokens; None for plain decoding.
        policy: Chooses how much to draft in every step; None for plain decoding.
        processors: Logits processors and their history.
        on_close: Function called with the counts when the sequence ends, for whatever reason.

    Attributes:
        common_sampler: Sampler that a batch may apply to several sequences at once; None to sample
            this sequence alone.
        stats: Counts of its steps and tokens.
        num_ready: Tokens that can be delivered without another step.
        has_begun: Whether the prompt without its last token is processed.
        is_finished: Whether it has ended.
        is_cancelled: Whether it ends before its next step.
        is_closed: Whether its caches are the caller's again.
        outlook: Probabilities of the drafts of a prompt lookup, from the newest `look`.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache | Slot,
        sampler: TokenSampler,
        request: Request,
        drafting: Drafting | None = None,
        policy: DraftPolicy | None = None,
        processors: ProcessorChain | None = None,
        on_close: Callable[[DecodingStats], None] = lambda stats: None,
    ):
        self.target = target
        self.cache = cache
        self.sampler = sampler
        self.common_sampler = sampler if isinstance(sampler, KeyedSampler) else None
        self.request = request
        self.drafting = drafting
        self.policy = policy
        self.processors = processors
        self.stats = DecodingStats()
        self.num_ready = 0
        self.outlook: Sequence[float] | None = None
        self.has_begun = False
        self.is_finished = self.is_cancelled = self.is_closed = False
        self._on_close = on_close
        self._clock = StepClock()
        self._end_of_prompt = cache.length + len(request.prompt)
        # Tokens of all steps so far.
        self._num_tokens = 0
        # The policy of the sequence while it is in no batch.
        self._own_policy = policy
        # The newest forward pass.
        self._pending: PendingPass | None = None
        # The pass whose tokens `take` returns, from `ask` on.
        self._taken: PendingPass | None = None
        # Drafts of what follows the newest pass.
        # Newest wish, and the drafts that were dispatched for it; None if there are none.
        self._wish: Wish | None = None
        self._drafts: TokenTree | None = None
        # Whether the policy chooses the drafts of this step.
        self._chooses = False
        # Whether this step verifies no drafts, as there are none, or those of a probe.
        self._is_plain = True
        # The drafts to verify, if the policy chose them before the newest pass was read.
        self._kept: TokenTree | None = None
        # The root or tree that the target is to process, until it has answered.
        self._asked: mx.array | TokenTree | None = None

    def step(self) -> list[Token]:
        """Decode one step: the accepted drafts and the target's own token after them.

        The first step is the prompt, which yields one token. The second one yields none: from then
        on, every step returns the tokens of the pass that the step before has dispatched.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        self.draft()
        drafts = self.ask()
        if drafts is not None:
            self.answer(self.sample(drafts, self._run_target(drafts)))
        return self.take()

    def draft(self) -> None:
        """Dispatch drafts of what may follow the newest pass, without waiting for that pass.

        Prompt lookup is an exception: it needs the tokens of the pass.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        self.look()
        wish = self.wish()
        if wish is not None:
            first, plan = wish.pending, wish.plan
            with mx.stream(generation_stream):
                noise = self.sampler.noise(
                    first.length + 1, plan.shape.length, first.num_accepted, first.max_accepted
                )
                wish = wish._replace(noise=noise)
                tree = wish.drafting.propose(wish.pending, wish.plan.searched, wish.noise)
                if tree is not None and tree.known is None:
                    reads = self.policy is None or self.policy.reads_drafts
                    mx.async_eval(tree.arrays if reads else tree.unscored_arrays)
            self.receive(wish, tree)

    def look(self) -> bool:
        """Ask the drafting for its outlook; return whether the policy has anything to choose."""
        is_last = self._num_tokens + 1 == self.request.max_tokens
        has_none = is_last or self.policy is None or self.drafting is None
        self._chooses = not has_none and self._pending is not None
        self.outlook = self.drafting.outlook() if self._chooses and self.drafting else None
        return self._chooses

    def wish(self) -> Wish | None:
        """Choose, after `look`, the drafts of what may follow the newest pass; None for no drafts.

        The caller adds the noise, for several sequences with the same operations.

        Before the first pass, process the prompt without its last token, unless a batch does.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        pending, self._wish, self._drafts = self._pending, None, None
        if pending is None:
            if not isinstance(self.cache, Slot):
                self.begin()
            return None
        if pending.is_accepted:
            pending.check_finite()  # NaN may follow drafts that were accepted
        plan = self.policy.choose(self.outlook) if self._chooses and self.policy else None
        self._is_plain = plan is None or plan.is_probe
        if plan is None or self.drafting is None:
            if pending.is_accepted:
                self._show(pending)
            return None
        pending.is_shown = True
        return Wish(self.drafting, pending, plan)

    def receive(self, wish: Wish, tree: TokenTree | None) -> None:
        """Set the drafts that were dispatched for a wish; None if there are none."""
        self._wish, self._drafts = wish, tree

    def read(self) -> None:
        """Read and commit the newest pass, if the next one depends on its outcome."""
        pending = self._pending
        if pending is None or pending.is_accepted or (pending.path is None and self._is_plain):
            return
        self._taken = pending
        self._accept(pending)

    @property
    def offer(self) -> Offer | None:
        """After `read`, the drafts of which the policy may keep some; None for plain decoding."""
        pending, wish, tree = self._pending, self._wish, self._drafts
        if self._is_plain or self.is_finished or pending is None or not pending.is_finite:
            return None
        if self.policy is None or wish is None or tree is None:
            return None
        return Offer(self.policy, wish.plan, tree)

    def ask(self) -> mx.array | TokenTree | None:
        """Return what the target is to process next: a root, shape (1,), or a tree.

        In a batch, the first root has the end of the prompt before it, shape (n,).

        After a tree this does `read` first, unless the target may follow a path that the host has
        not read. From one token to the next it reads nothing, as the length is known anyway. None
        at the end.
        """
        if self._follow():
            self._taken, self._asked = self._pending, self._kept
            return self._asked
        self.read()
        pending = self._pending
        if pending is None:
            # The last token of the prompt alone, as in mlx-lm; in a batch, also those before it.
            last = mx.array(self.request.prompt[-self.num_unread :], dtype=mx.int32)
            self._asked = None if self.is_finished else last
        elif pending.path is None and self._is_plain and not pending.is_accepted:
            self._taken = pending
            self._asked = pending.root if self._needs_next else None
        elif not self.is_finished and pending.is_finite:
            tree = None if self._is_plain else self._keep_drafts()
            self._asked = pending.root if tree is None else tree
        return self._asked

    def answer(self, chosen: PendingPass) -> None:
        """Make the target's answer, whose computation is dispatched, the newest pass."""
        asked, self._asked = self._asked, None
        chosen.plan = None if self._wish is None else self._wish.plan
        chosen.length = self.cache.length
        if isinstance(asked, TokenTree):
            chosen.num_nodes, chosen.num_unmerged = asked.num_nodes, asked.num_unmerged
            chosen.known = asked.known
        else:
            chosen.length -= 1  # the root is committed already
        if self._pending is None:
            chosen.num_nodes = chosen.num_unmerged = 0
            # Nothing is dispatched behind the first token, as to dispatch may mean to wait.
            self._taken = chosen
            if self.drafting is not None:
                self.drafting.outlook()  # a lookup indexes the prompt while the device is busy
        self._pending = chosen

    def take(self) -> list[Token]:
        """Wait for the pass before the newest one, commit it, and return its tokens.

        Tokens after the end of the sequence are cut.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        taken, self._taken = self._taken, None
        if taken is not None:
            if not taken.is_accepted:
                self._accept(taken)
            if self._wish is None and taken.num_nodes:
                self._show(taken)
        if self._is_plain and self._wish is not None and not self.is_finished:
            self._keep_drafts()  # of a probe, from which the policy updates its estimates
        return [] if taken is None else taken.kept_tokens

    def sample(self, drafts: mx.array | TokenTree, outputs: TargetOutputs) -> PendingPass:
        """Sample the target's tokens after a root or a tree, and dispatch that.

        Args:
            drafts: The root or the tree from `ask`.
            outputs: The target's outputs for it.
        """
        with mx.stream(generation_stream):
            outputs = outputs._replace(logits=self.process(drafts, outputs.logits))
        return self.choose(drafts, outputs)

    def choose(self, drafts: mx.array | TokenTree, outputs: TargetOutputs) -> PendingPass:
        """Do what `sample` does, with logits that are processed already."""
        with mx.stream(generation_stream):
            if isinstance(drafts, TokenTree):
                return sample_and_accept(self.sampler, outputs, drafts, self.noise, self.num_best)
            # The token just processed, the last of the committed ones, is the root of this choice.
            noise = self.sampler.noise(self.cache.length - 1, 1)
            return sample_root(self.sampler, outputs, noise, self.num_best)

    def process(self, drafts: mx.array | TokenTree, logits: mx.array) -> mx.array:
        """Apply the logits processors, if any, to the logits after a root or a tree, (N, V)."""
        if self.processors is None:
            return logits
        if isinstance(drafts, TokenTree):
            self.processors.extend(drafts.tokens[:1])
            return self.processors.process_tree(logits, drafts)
        if self._pending is not None:  # the processors know the prompt
            self.processors.extend(drafts)
        return self.processors.process(logits)

    def begin(self) -> None:
        """Process the prompt without its last token, unless that is done."""
        while not self.has_begun:
            self.process_chunk()

    def process_chunk(self, most: int | None = None) -> None:
        """Process a chunk of the prompt without its last token; the last chunk sets `has_begun`.

        Tokens that the cache holds, such as those of a shared prefill, are left out. A sequence
        that is cancelled meanwhile is finished.

        Args:
            most: Maximum number of tokens, if less than the request allows. A cache that is yet
                to quantise its entries has the chunks of a sequence alone.
        """
        request, total = self.request, len(self.request.prompt)
        done = total - self.num_unread
        if done == 0:
            request.on_progress(done, total)
        left = total - 1 - done
        if left > 0 and not self.is_cancelled:
            size = min(left, request.prefill_step_size)
            if request.chunk_size is not None:
                size = min(size, request.chunk_size(done))
            if most is not None and self.own_cache.may_split:
                size = min(size, most)
            chunk = mx.array(request.prompt[done : done + size], dtype=mx.int32)
            with mx.stream(generation_stream):
                outputs = self.target.process_chunk(chunk, self.own_cache, self.layers)
                self.read_states(outputs.states)
                wait_for([layer.state for layer in self.own_cache.stock])
                mx.clear_cache()
            request.on_progress(done + size, total)
            left -= size
        if self.is_cancelled:
            self.is_finished = True
        self.has_begun = left <= 0 or self.is_finished

    def read_states(self, states: mx.array | None) -> None:
        """Let the drafting read the states of the next tokens of the prompt, if it reads any."""
        reader = None if self.drafting is None else self.drafting.reader
        if states is not None and reader is not None:
            reader.read(states)

    def finish_pass(self) -> list[Token]:
        """Read and commit the newest pass, so that the sequence can move to other caches.

        Returns:
            The tokens of that pass; none if they were taken already, as after the prompt.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        tokens: list[Token] = []
        if self._pending is not None and not self._pending.is_accepted:
            self._accept(self._pending)
            tokens = self._pending.kept_tokens
        return tokens

    def move(self, cache: TreeCache | Slot, policy: DraftPolicy | None = None) -> None:
        """Continue in another cache.

        Args:
            cache: A slot of a batch, or the sequence's own cache again.
            policy: Policy in the batch; the sequence's own cache comes with its own policy.
        """
        self.cache = cache
        self.policy = self._own_policy if isinstance(cache, TreeCache) else policy

    def deliver(self, tokens: Sequence[Token]) -> Iterator[Token]:
        """Yield tokens, and count them and the time that the caller spends with each."""
        for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
            self.num_ready = left
            self.stats.num_tokens += 1
            start = time.perf_counter()
            try:
                yield token
            finally:
                self._clock.away += time.perf_counter() - start

    def cancel(self) -> None:
        """End the sequence before its next step or chunk of the prompt; from any thread."""
        self.is_cancelled = True

    def fail(self) -> None:
        """Give up the drafts after an error: their caches may be half-way."""
        self.drafting = None

    def close(self) -> None:
        """End the sequence; with ``leave_as_stock`` the caches hold what the caller has taken."""
        self.is_finished = True
        self._on_close(self.stats)
        try:
            if self.request.leave_as_stock:
                self._settle(self.stats.num_tokens)
        finally:
            self.is_closed = True

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the target whose states the drafting reads."""
        reader = None if self.drafting is None else self.drafting.reader
        return () if reader is None else reader.layers

    @property
    def num_best(self) -> int:
        """Number of most probable tokens after each node that the drafting asks for."""
        return self.drafting.num_best if isinstance(self.drafting, Recycling) else 0

    @property
    def shares_prefill(self) -> bool:
        """Whether it may share the passes over its prompt with others.

        A cache that quantises its entries does so after each chunk of its own. A prompt of several
        chunks would need as many passes with others.
        """
        request, is_new = self.request, type(self.cache) is TreeCache and self.cache.length == 0
        has_one_chunk = 1 < len(request.prompt) <= request.prefill_step_size
        return is_new and has_one_chunk and request.chunk_size is None

    @property
    def num_unread(self) -> int:
        """Number of tokens of the prompt that are not processed, before the first pass."""
        return self._end_of_prompt - self.cache.length

    def num_kept(self) -> int:
        """Return the number of tokens that its caches will hold at least when it ends."""
        if not self.request.leave_as_stock:
            return sys.maxsize
        return self._end_of_prompt + self.stats.num_tokens

    @property
    def noise(self) -> GumbelNoise | None:
        """Noise of the choices after the tree that `ask` returned; None without one."""
        is_tree = isinstance(self._asked, TokenTree)
        return self._wish.noise if is_tree and self._wish is not None else None

    @property
    def own_cache(self) -> TreeCache:
        """The cache of a sequence that is in no batch."""
        assert isinstance(self.cache, TreeCache)
        return self.cache

    @property
    def _needs_next(self) -> bool:
        """Whether the target has to process the token in flight, too."""
        return self.request.leave_as_stock or self._num_tokens + 1 != self.request.max_tokens

    def _run_target(self, drafts: mx.array | TokenTree) -> TargetOutputs:
        """Run the target on a root or a tree of this sequence alone."""
        with mx.stream(generation_stream):
            if isinstance(drafts, TokenTree):
                outputs = self.target.verify(drafts, self.own_cache, self.layers)
                if self.target.compiled is not None and self.target.compiled.is_first_use:
                    self._clock.skip()
                return outputs
            return self.target.advance(drafts, self.own_cache, self.layers)

    def _show(self, pending: PendingPass) -> None:
        """Show the proposer an accepted pass after which it drafts nothing."""
        pending.is_shown = True
        if self.drafting is not None:
            with mx.stream(generation_stream):
                self.drafting.skip(pending)

    def _follow(self) -> bool:
        """Commit the newest pass before the host has read it, if the next one can follow it."""
        pending, policy, wish, drafts = self._pending, self.policy, self._wish, self._drafts
        compiled, self._kept = self.target.compiled, None
        if self._is_plain or pending is None or pending.path is None or pending.is_read:
            return False
        if policy is None or wish is None or drafts is None:
            return False
        is_on_host = self.processors is not None or self.common_sampler is None
        # A cache of a batch must know its length, and so must one that quantises its entries.
        if is_on_host or compiled is None or type(self.cache) is not TreeCache:
            return False
        with mx.stream(generation_stream):
            tree = self._kept = policy.keep_early(wish.plan, drafts)
            longest = pending.max_accepted + 1
            if tree is None or not compiled.may_follow(tree, self.cache, self.layers, longest):
                return False
            self.cache.follow(pending.path, pending.num_accepted)
        return True

    def _keep_drafts(self) -> TokenTree | None:
        """Let the policy choose the drafts to verify; None if it chooses none."""
        wish, drafts = self._wish, self._drafts
        if self.policy is None or wish is None or drafts is None:
            return None
        with mx.stream(generation_stream):
            tree = self._kept or self.policy.keep(wish.plan, drafts)
        return tree if tree.size > 1 and self.cache.takes(tree) else None

    def _accept(self, pending: PendingPass) -> None:
        """Wait for a pass, commit what it accepted, and find where the sequence ends."""
        rows, tokens = pending.rows, pending.tokens
        num_accepted = len(rows) - 1
        if pending.path is not None:
            with mx.stream(generation_stream):
                self.cache.commit(rows)
                self.sampler.commit(len(rows))
            if self._pending is not None and self._pending is not pending:  # dispatched before
                self._pending.length = self.cache.length
                if not pending.is_finite:
                    self._pending = pending
            if self.processors is not None and num_accepted:
                self.processors.extend(mx.array(tokens[:num_accepted], dtype=mx.int32))
        self._count(pending, num_accepted)
        pending.finish_reason, pending.num_kept = self.request.find_end(tokens, self._num_tokens)
        pending.is_accepted = True
        self.is_finished = pending.finish_reason is not None
        self._num_tokens += pending.num_kept

    def _count(self, pending: PendingPass, num_accepted: int) -> None:
        if not pending.num_nodes:  # as in mlx-lm, the prompt is done with the first token
            self.request.on_progress(len(self.request.prompt), len(self.request.prompt))
            return
        self.stats.count_step(num_accepted, pending.num_nodes, pending.num_unmerged)
        seconds = self._clock.lap()
        if self.policy is not None:
            self.policy.observe(Step(pending.plan, pending.num_nodes, pending.tokens, seconds))

    def _settle(self, num_taken: int) -> None:
        """Leave the caches with the prompt and the first ``num_taken`` tokens."""
        pending = self._pending
        # A cache holds the K/V entry of the root of a tree in flight beyond the committed ones.
        has_root = pending is not None and pending.path is not None and not pending.is_accepted
        try:
            # Without an answer the caches may hold a part of that pass.
            if pending is not None and pending.is_accepted and self._asked is None:
                if not pending.is_shown:
                    self._show(pending)
                if num_taken == self._num_tokens:
                    self._catch_up(pending)
        finally:
            # After an interruption the cache may lack entries of tokens that were taken.
            length = min(self._end_of_prompt + num_taken, self.cache.length + has_root)
            self.own_cache.settle(length)
        if self.drafting is not None:
            self.drafting.settle(length)

    def _catch_up(self, pending: PendingPass) -> None:
        """Process the last token, and leave the random state where plain decoding has it."""
        num_cut = len(pending.tokens) - pending.num_kept
        if num_cut == 0:
            self.sample(pending.root, self._run_target(pending.root))
        else:
            self.sampler.commit(len(pending.tokens) - num_cut + 1)

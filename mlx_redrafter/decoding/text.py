"""The decoding loop: draft, verify, accept, commit.

Axes: N nodes of the tree, L beam length, H hidden size, V vocabulary.

The host reads the outcome of a step while the device drafts the next one (in plain decoding, while
it computes the next token), so the device is not idle for a read, and the length of every forward
pass is a number that the host knows. A controller that looks at a draft's probabilities before it
decides how much of it is verified waits for the draft, too: the device is idle while the host
builds the graph of that forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.config import TreeShape
from mlx_redrafter.decoding.accept import accept
from mlx_redrafter.decoding.clock import StepClock
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.sampling import GumbelNoise, TokenChooser
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.host import to_floats, to_ints
from mlx_redrafter.policy.adaptive import DraftPolicy, Drafts
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import ProgressCallback, Target, TargetOutputs
from mlx_redrafter.tree import TokenTree, best_nodes, merge_beams

# Like mlx-lm: give memory that MLX keeps for reuse back every so many tokens.
CLEAR_CACHE_EVERY = 256
# Stands for the number of accepted drafts where the logits were NaN.
NOT_A_NUMBER = -1


@dataclass(frozen=True)
class Request:
    """One text to decode.

    Attributes:
        prompt: Token ids, at least one.
        stop_tokens: Ids after which decoding ends.
        max_tokens: Most tokens to yield, -1 for no limit.
        prefill_step_size: Most prompt tokens per forward pass.
        on_progress: Called with prompt tokens processed and their number.
        leave_as_stock: Leave the K/V cache and the random state as mlx-lm does, with the last token
            processed as well, which takes one more forward pass.
    """

    prompt: list[int]
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = -1
    prefill_step_size: int = 2048
    on_progress: ProgressCallback = field(default=lambda done, total: None)
    leave_as_stock: bool = False


@dataclass(frozen=True)
class Token:
    """One token of the text.

    Attributes:
        id: Token id.
        is_draft: Whether a drafted token was accepted, rather than the target's own added.
        log_probs: Natural log-probabilities after logits processors, shape (V,).
        finish_reason: "stop" or "length" on the last token, else None.
    """

    id: int
    is_draft: bool
    log_probs: mx.array
    finish_reason: str | None


class Proposal(NamedTuple):
    """A dispatched draft: its shape, the tree, and the noise of the choices after its nodes."""

    shape: TreeShape
    tree: TokenTree
    noise: GumbelNoise | None


@dataclass(frozen=True)
class InFlight:
    """A dispatched forward pass whose outcome the host has not read yet.

    Attributes:
        outcome: int32: number of drafts accepted, bonus token, and for a tree, of every node on
            the path, its index and its token (L each).
        root: The bonus token, which is the next root, int32, shape (1,).
        position: Where that root will stand, int32, shape (1,).
        hidden: Target state that predicted it, shape (H,).
        log_probs: Shape (N, V).
        shape: Of the tree; None for one token.
        path: Accepted path, int32, shape (L,), junk after the accepted nodes; None for one token.
        num_nodes: Nodes verified; 0 for the prefill, which is no step.
        num_unmerged: What they would have been without merging.
    """

    outcome: mx.array
    root: mx.array
    position: mx.array
    hidden: mx.array
    log_probs: mx.array
    shape: TreeShape | None
    path: mx.array | None
    num_nodes: int
    num_unmerged: int


@dataclass(frozen=True)
class Outcome:
    """What a forward pass yields.

    Attributes:
        tokens: Tokens to yield: accepted drafts and the bonus token, cut where decoding ends.
        rows: For each of them, its row of the log-probabilities.
        num_accepted: Accepted drafts, before cutting.
        finish_reason: Why decoding ends with them, None if it goes on.
    """

    tokens: list[int]
    rows: list[int]
    num_accepted: int
    finish_reason: str | None


class Decoder:
    """Decodes one request, with a drafter or without; the text is the same.

    Args:
        target: The model whose text it is.
        cache: Its K/V cache.
        chooser: Chooses the target's tokens.
        drafter: Proposes tokens; None for plain decoding.
        controller: Chooses the shape of what it proposes, step by step.
        processors: Logits processors and their history.
        couples: Draft with the noise that the target will choose with, where there is some.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        chooser: TokenChooser,
        drafter: Drafter | None,
        controller: DraftPolicy,
        processors: ProcessorChain | None = None,
        couples: bool = True,
    ):
        self.target = target
        self.cache = cache
        self.chooser = chooser
        self.drafter = drafter
        self.controller = controller
        self.processors = processors
        self.couples = couples
        self.enter = None if drafter is None else input_lookup(drafter, target)
        self.clock = StepClock()
        self.stats = DecodingStats()

    def decode(self, request: Request) -> Iterator[Token]:
        """Yield the text token by token.

        With ``request.leave_as_stock`` the stock caches hold, however decoding ends, the prompt and
        the tokens yielded.

        Raises:
            NonFiniteError: The logits after the prompt are NaN.
        """
        end_of_prompt = self.cache.length + len(request.prompt)
        try:
            yield from self._decode(request)
        finally:
            if request.leave_as_stock:
                num_tokens = self.stats.num_tokens
                processed = self.cache.length if num_tokens == 0 else end_of_prompt + num_tokens
                self.cache.settle(min(processed, end_of_prompt + num_tokens))

    def _decode(self, request: Request) -> Iterator[Token]:
        flight = self._prefill(request)
        following: InFlight | None = None
        if not request.leave_as_stock:
            # Nothing that comes after the first token delays it: dispatching may wait for a device
            # that is busy.
            outcome = self._read(flight, request)
            yield from self._emit(outcome, flight)
            if outcome.finish_reason is not None:
                return
            shape = self.controller.choose()
            proposal = None if shape is None else self._draft(shape, flight)
            flight = self._proceed(proposal, flight.root)
        while True:
            is_last = self.stats.num_tokens + 1 == request.max_tokens
            shape = None if is_last else self.controller.choose()
            if shape is None and flight.path is None:
                # From one token to the next: the length is known before the outcome is.
                if not is_last or request.leave_as_stock:
                    following = self._advance(flight.root)
                outcome = self._read(flight, request)
            else:
                proposal = None if shape is None else self._draft(shape, flight)
                outcome = self._read(flight, request)
                if outcome.finish_reason is None:
                    following = self._proceed(proposal, flight.root)
                elif request.leave_as_stock:
                    self._catch_up(outcome, flight)
            yield from self._emit(outcome, flight)
            if outcome.finish_reason is not None or following is None:
                return
            flight = following

    def _prefill(self, request: Request) -> InFlight:
        with mx.stream(generation_stream):
            prompt = mx.array(request.prompt, dtype=mx.int32)
            forward = self.target.prefill(
                prompt, self.cache, request.prefill_step_size, request.on_progress
            )
            is_nan = mx.any(mx.isnan(forward.logits), keepdims=True)[0]
            return self._dispatch_token(forward, mx.where(is_nan, NOT_A_NUMBER, 0), num_nodes=0)

    def _advance(self, root: mx.array) -> InFlight:
        """Process the root alone, as plain decoding does."""
        with mx.stream(generation_stream):
            if self.processors is not None:
                self.processors.extend(root)
            forward = self.target.advance(root, self.cache)
            return self._dispatch_token(forward, mx.zeros((1,), dtype=mx.int32), num_nodes=1)

    def _dispatch_token(self, forward: TargetOutputs, status: mx.array, num_nodes: int) -> InFlight:
        logits = forward.logits
        if self.processors is not None:
            logits = self.processors.process(logits)
        log_probs = normalise(logits)
        depths = mx.zeros((1,), dtype=mx.int32)
        position = mx.array([self.cache.length], dtype=mx.int32)
        # The token just processed, the last of the committed ones, is the root of this choice.
        noise = self.chooser.noise(position - 1, 1)
        root = self.chooser.choose(log_probs, depths, noise, 1).astype(mx.int32)
        outcome = mx.concatenate([status.astype(mx.int32), root])
        hidden = forward.hiddens[0]
        mx.async_eval(outcome, hidden, log_probs)
        return InFlight(
            outcome, root, position, hidden, log_probs, None, None, num_nodes, num_nodes
        )

    def _draft(self, shape: TreeShape, flight: InFlight) -> Proposal:
        assert self.drafter is not None
        assert self.enter is not None
        with mx.stream(generation_stream):
            noise = self.chooser.noise(flight.position, shape.beam_length)
            rank = noise.ranking(self.drafter) if noise is not None and self.couples else None
            expansion = expand(self.drafter, self.enter, flight.hidden, flight.root, shape, rank)
            select = best_nodes if shape.select == "top_n" else merge_beams
            tree = select(expansion, flight.root, shape)
            mx.async_eval(tree.arrays)
        return Proposal(shape, tree, noise)

    def _proceed(self, proposal: Proposal | None, root: mx.array) -> InFlight:
        """Process the drafts that the controller finds worth it, or the root alone."""
        if proposal is None:
            return self._advance(root)
        shape, tree, noise = proposal

        def read() -> Drafts:
            assert tree.scores is not None
            return Drafts(to_floats(tree.scores), to_ints(tree.depths)[1:])

        kept = self.controller.cut(shape, read)
        if kept != shape:
            assert kept.tree_nodes is not None
            tree = tree.first(kept.tree_nodes)
        return self._verify(Proposal(kept, tree, noise))

    def _verify(self, proposal: Proposal) -> InFlight:
        shape, tree, noise = proposal
        length = self.cache.length
        with mx.stream(generation_stream):
            forward = self.target.verify(tree, self.cache)
            logits = forward.logits
            if self.processors is not None:
                self.processors.extend(tree.tokens[:1])
                logits = self.processors.process_tree(logits, tree)
            log_probs = normalise(logits)
            chosen = self.chooser.choose(log_probs, tree.depths, noise, shape.beam_length)
            path, num_accepted, bonus = accept(tree, chosen, shape.beam_length)
            hidden = forward.hiddens[path[num_accepted]][0]
            outcome = mx.concatenate([num_accepted, bonus, path, tree.tokens[path]])
            mx.async_eval(outcome, hidden, log_probs)
        return InFlight(
            outcome=outcome,
            root=bonus,
            position=num_accepted + (length + 1),
            hidden=hidden,
            log_probs=log_probs,
            shape=shape,
            path=path,
            num_nodes=tree.num_nodes,
            num_unmerged=tree.num_unmerged,
        )

    def _read(self, flight: InFlight, request: Request) -> Outcome:
        """Wait for a forward pass, commit what it accepted, and cut it where decoding ends."""
        num_accepted, bonus, *path = to_ints(flight.outcome)
        if num_accepted == NOT_A_NUMBER:
            raise NonFiniteError(
                "the target's logits after the prompt are NaN; its weights are damaged, or its "
                "dtype overflows (bfloat16 or float32 may not)"
            )
        rows, tokens = [0], [bonus]
        if flight.path is not None:
            kept, length = num_accepted + 1, len(path) // 2
            rows, drafts = path[:kept], path[length : length + kept]
            tokens = [*drafts[1:], bonus]
            with mx.stream(generation_stream):
                self.cache.commit(rows)
                self.chooser.keep(kept)
            if self.processors is not None and num_accepted:
                self.processors.extend(mx.array(tokens[:-1], dtype=mx.int32))
        if flight.num_nodes:
            self.stats.count_step(num_accepted, flight.num_nodes, flight.num_unmerged)
            self.controller.observe(flight.shape, num_accepted, self.clock.lap())
        else:  # as in mlx-lm, the prompt is done with the first token
            request.on_progress(len(request.prompt), len(request.prompt))
        finish_reason, length = find_end(tokens, self.stats.num_tokens, request)
        return Outcome(tokens[:length], rows[:length], num_accepted, finish_reason)

    def _catch_up(self, outcome: Outcome, flight: InFlight) -> None:
        """Process the last token, and leave the random state where plain decoding has it."""
        if len(outcome.tokens) == outcome.num_accepted + 1:
            self._advance(flight.root)
        else:
            self.chooser.keep(len(outcome.tokens) + 1)

    def _emit(self, outcome: Outcome, flight: InFlight) -> Iterator[Token]:
        last = len(outcome.tokens) - 1
        for i, (token, row) in enumerate(zip(outcome.tokens, outcome.rows, strict=True)):
            self.stats.num_tokens += 1
            if self.stats.num_tokens % CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
            with self.clock.away():
                yield Token(
                    id=token,
                    is_draft=i < outcome.num_accepted,
                    log_probs=flight.log_probs[row],
                    finish_reason=outcome.finish_reason if i == last else None,
                )


def normalise(logits: mx.array) -> mx.array:
    """Natural log-probabilities, shape (N, V), in the dtype of the logits, as mlx-lm has them."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def find_end(tokens: list[int], num_before: int, request: Request) -> tuple[str | None, int]:
    """Why and after how many of these tokens decoding ends: (None, all of them) if it goes on."""
    has_limit = request.max_tokens >= 0
    left = request.max_tokens - num_before if has_limit else len(tokens)
    for i, token in enumerate(tokens[:left]):
        if token in request.stop_tokens:
            return "stop", i + 1
    if has_limit and left <= len(tokens):
        return "length", left
    return None, len(tokens)

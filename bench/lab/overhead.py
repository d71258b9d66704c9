"""Overhead of a decoding step: its cost beyond the two networks.

``overhead = t_step - t_verify(N) - t_draft``, from interleaved triples: a step of the running
decoder, the target's forward pass over a tree of the same size at the same length alone, and the
drafting of one tree alone. All are shares of a step of stock mlx-lm, measured in the same rounds.

Axes: N nodes of the tree, L beam length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream

from mlx_redrafter.bench.lab.contexts import PREFILL_STEP, filled_cache
from mlx_redrafter.bench.lab.rounds import scaled, take_turns
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, timed
from mlx_redrafter.decoding.accept import accept
from mlx_redrafter.decoding.decode import decode
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler, choose, mark_nan
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.proposers.expansion import build_tree
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter, RecurrentLevels
from mlx_redrafter.proposers.search import search_all
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Rounds that are not recorded.
WARM_UP = 5


@dataclass(frozen=True)
class Overhead:
    """Parts of a step's time, in seconds.

    Attributes:
        overhead: Median of the differences of each triple.
        unhidden: The same with the building of graphs counted as overhead, not as verify or draft.
        parts: All measured times, by name.
        tokens_per_step: Tokens per step of the measured texts.
        samples: Raw seconds by name, one per round.
    """

    overhead: MedianEstimate
    unhidden: MedianEstimate
    parts: dict[str, MedianEstimate]
    tokens_per_step: float
    samples: dict[str, list[float]]

    @property
    def share(self) -> MedianEstimate:
        """Overhead as a share of a stock mlx-lm step."""
        return scaled(self.overhead, 1 / self.parts["stock step"].median)


def measure_overhead(
    model: nn.Module,
    drafter: Drafter,
    prompt: Sequence[int],
    plan: DraftPlan,
    rounds: int = 100,
    temp: float = 0.0,
    max_tokens: int = 1000,
    on_progress: OnProgress = lambda done, total: None,
) -> Overhead:
    """Measure in turns until every round has a triple.

    Args:
        model: The target.
        drafter: Drafter of the target.
        prompt: Token ids; every part sees at least this much context.
        plan: Plan of every step, with ``select="top_n"``, whose trees all have N nodes.
        rounds: Triples that count.
        temp: Temperature of the decoder; noise is part of the overhead.
        max_tokens: Tokens after which the text begins again: attention to a longer one takes more
            time, which also varies more.
        on_progress: Callback for the rounds done and their number.
    """
    if plan.shape.select != "top_n":
        raise ConfigError(
            "the overhead is measured with select='top_n', whose trees are all of one size"
        )
    bench = _OverheadJobs(model, drafter, prompt, plan, temp, max_tokens)
    samples = take_turns(
        {
            "stock step": bench.stock_step,
            "step": bench.step,
            "draft and verify": bench.draft_and_verify,
            "verify(1)": bench.verify_one,
            "accept": bench.accept,
        },
        rounds,
        WARM_UP,
        on_progress=on_progress,
    )
    samples |= {name: values[WARM_UP:] for name, values in bench.details.items()}
    del samples["draft and verify"]
    overhead = [
        step - verify - draft
        for step, verify, draft in zip(
            samples["step"], samples["verify"], samples["draft"], strict=True
        )
    ]
    building = zip(samples["verify: host"], samples["draft: host"], strict=True)
    unhidden = [time + sum(host) for time, host in zip(overhead, building, strict=True)]
    return Overhead(
        overhead=estimate(overhead),
        unhidden=estimate(unhidden),
        parts={name: estimate(values) for name, values in samples.items()},
        tokens_per_step=bench.tokens_per_step,
        samples=samples,
    )


class _ReadingPolicy(FixedPolicy):
    """A fixed plan that reads the drafts' scores, as `AdaptivePolicy` does."""

    reads_drafts = True

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Read the scores and keep all nodes."""
        tree.read()
        return tree


class _OverheadJobs:
    """Everything that is timed.

    The running decoder and the forward passes timed alone have caches of their own, of the same
    length.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter,
        prompt: Sequence[int],
        plan: DraftPlan,
        temp: float,
        max_tokens: int,
    ):
        self.prompt, self.max_tokens = list(prompt), max_tokens
        self.plan, self.drafter = plan, drafter
        self.target = Target(model)
        self.project_input = input_lookup(drafter, self.target)
        self.chooser = KeyedSampler(SamplingParams(temp=temp), self.target.vocab_size)
        self.texts: list[DecodingStats] = []
        # Room for the longest text, two steps more, and the pass in flight.
        self.cache = filled_cache(self.target, len(prompt) + max_tokens + 4 * plan.shape.length)
        self.hidden = mx.zeros((self.target.hidden_size,))
        self.root = mx.array([prompt[-1]], dtype=mx.int32)
        self.tree = self._draft()
        mx.eval(self.tree.arrays)
        self.logits = mx.zeros((1, 1))
        self.details: dict[str, list[float]] = {
            name: [] for name in ("draft", "draft: host", "verify", "verify: host", "commit")
        }
        self._begin()
        self.draft_and_verify()
        for values in self.details.values():
            values.clear()

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of all texts, without the first token of each."""
        tokens = sum(text.num_tokens - 1 for text in self.texts)
        return tokens / sum(text.steps for text in self.texts)

    def step(self) -> float:
        """Time one step of the running decoder, after one that fills the pipeline again."""
        mx.synchronize(generation_stream)
        if self.text.stats.num_tokens >= self.max_tokens:
            self._begin()
        self._next_step()
        seconds = timed(self._next_step)
        mx.synchronize(generation_stream)
        return seconds

    def stock_step(self) -> float:
        """Time one step of stock mlx-lm, likewise after another one."""
        next(self.stock)
        seconds = timed(lambda: next(self.stock))
        mx.synchronize(generation_stream)
        return seconds

    def draft_and_verify(self) -> float:
        """Draft one tree and verify it, each alone, at the length that the decoder has reached."""
        self.cache.settle(self.text.cache.length)
        with mx.stream(generation_stream):
            start = time.perf_counter()
            self.tree = self._draft()
            built = time.perf_counter()
            mx.eval(self.tree.arrays)
            drafted = time.perf_counter()
            forward = self.target.verify(self.tree, self.cache)
            verify_built = time.perf_counter()
            mx.eval(forward.logits, forward.hidden_states)
            verified = time.perf_counter()
            # Once more, with the rows of two accepted nodes to move as well.
            self.cache.commit([0, 2])
            commit = timed(lambda: mx.eval(*self.target.verify(self.tree, self.cache)))
        self.logits, self.hidden = forward.logits, forward.hidden_states[0]
        mx.eval(self.hidden)
        for name, seconds in (
            ("draft", drafted - start),
            ("draft: host", built - start),
            ("verify", verified - drafted),
            ("verify: host", verify_built - drafted),
            ("commit", commit - (verified - drafted)),
        ):
            self.details[name].append(seconds)
        return verified - start

    def verify_one(self) -> float:
        """Time a forward pass over one token."""
        self.cache.settle(self.text.cache.length)
        with mx.stream(generation_stream):
            return timed(lambda: mx.eval(*self.target.advance(self.root, self.cache)))

    def accept(self) -> float:
        """Time sampling and acceptance, from logits already computed."""

        def work() -> list[int]:
            length, depths = self.plan.shape.length, self.tree.depths
            noise = self.chooser.noise(self.cache.length, length)
            _, sampled, normalisers = choose(self.chooser, self.logits, depths, noise, length)
            chosen = mark_nan(sampled, normalisers)
            path, num_accepted, bonus, _, tokens = accept(self.tree, chosen)
            return to_ints(mx.concatenate([num_accepted, bonus, path, tokens]))

        with mx.stream(generation_stream):
            return timed(work)

    def _begin(self) -> None:
        """Begin the text, drafted and with stock mlx-lm."""
        request = Request(self.prompt, prefill_step_size=PREFILL_STEP)
        drafting = self.drafter.open(self.target, self.prompt, True, [])
        cache, policy = self.target.new_cache(), _ReadingPolicy(self.plan)
        self.text = SequenceDecoder(self.target, cache, self.chooser, request, drafting, policy)
        self.texts.append(self.text.stats)
        self.tokens: Iterator[object] = decode(self.text)
        prompt = mx.array(self.prompt)
        self.stock = generate_step(
            prompt, self.target.model, max_tokens=-1, prefill_step_size=PREFILL_STEP
        )
        self._next_step()
        next(self.stock)

    def _draft(self) -> TokenTree:
        levels = RecurrentLevels(self.drafter, self.project_input, self.hidden[None], self.root)
        expansion = search_all(levels, self.plan.shape).alone
        return build_tree(expansion, self.root, self.plan)

    def _next_step(self) -> None:
        steps = self.text.stats.steps
        while self.text.stats.steps == steps:
            next(self.tokens)

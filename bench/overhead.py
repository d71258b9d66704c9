"""What a decoding step costs beyond its two networks.

``overhead = t_step - t_verify(N) - t_draft``, from triples measured in turns: a step of the running
decoder, the target's forward pass over a tree of the same size at the same length alone, and the
drafting of one tree alone. All as shares of a step of stock mlx-lm, measured in the same turns.

Axes: N nodes of the tree, L beam length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream

from mlx_redrafter.bench.contexts import PREFILL_STEP, filled_cache
from mlx_redrafter.bench.timing import Estimate, OnProgress, estimate, take_turns, timed
from mlx_redrafter.config import SamplingParams, TreeShape
from mlx_redrafter.decoding.accept import accept
from mlx_redrafter.decoding.sampling import KeyedChooser
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.decoding.text import Decoder, Request, normalise
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.host import to_ints
from mlx_redrafter.policy.adaptive import Drafts, FixedPolicy
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.tree import TokenTree, best_nodes

WARM_UP = 5


@dataclass(frozen=True)
class Overhead:
    """Where a step's time goes, in seconds.

    Attributes:
        overhead: Median of the differences of each triple.
        unhidden: The same, but with building a graph counted as overhead, not as verify or draft.
        parts: Everything that was timed, by name.
        tokens_per_step: Of the texts that were timed.
        samples: Raw seconds by name, one per round.
    """

    overhead: Estimate
    unhidden: Estimate
    parts: dict[str, Estimate]
    tokens_per_step: float
    samples: dict[str, list[float]]

    @property
    def share(self) -> Estimate:
        """Overhead as a share of a stock mlx-lm step."""
        return self.overhead.scaled(1 / self.parts["stock step"].median)


def measure_overhead(
    model: nn.Module,
    drafter: Drafter,
    prompt: Sequence[int],
    shape: TreeShape,
    rounds: int = 100,
    temp: float = 0.0,
    max_tokens: int = 1000,
    on_progress: OnProgress = lambda done, total: None,
) -> Overhead:
    """Measure in turns until every round has a triple.

    Args:
        model: The target.
        drafter: Its drafter.
        prompt: Token ids; every part sees at least this much context.
        shape: What is drafted; ``select`` is "top_n", whose trees all have N nodes.
        rounds: Triples that count.
        temp: Temperature of the decoder; noise is part of the overhead.
        max_tokens: After so many tokens the text begins again: over a longer one attention takes
            more time, and scatters by more.
        on_progress: Called with rounds done and their number.
    """
    if shape.select != "top_n":
        raise ConfigError(
            "the overhead is measured with select='top_n', whose trees are all of one size"
        )
    bench = _Bench(model, drafter, prompt, shape, temp, max_tokens)
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


class _ReadShape(FixedPolicy):
    """A fixed shape for which the decoder waits as it does for `AdaptivePolicy`."""

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """All of it, once its scores are there."""
        read()
        return shape


class _Bench:
    """The things that are timed.

    The decoder that runs and the forward passes that are timed alone have caches of their own, at
    the same length.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter,
        prompt: Sequence[int],
        shape: TreeShape,
        temp: float,
        max_tokens: int,
    ):
        self.prompt, self.max_tokens = list(prompt), max_tokens
        self.shape, self.drafter = shape, drafter
        self.target = Target(model)
        self.enter = input_lookup(drafter, self.target)
        self.chooser = KeyedChooser(SamplingParams(temp=temp), self.target.vocab_size)
        self.texts: list[DecodingStats] = []
        # Beyond the tokens after which a text ends, those of two steps and of what is in flight.
        self.cache = filled_cache(self.target, len(prompt) + max_tokens + 4 * shape.beam_length)
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
        """Over all texts, without the first token of each."""
        tokens = sum(text.num_tokens - 1 for text in self.texts)
        return tokens / sum(text.steps for text in self.texts)

    def step(self) -> float:
        """One step of the running decoder, after one that only gets it going again."""
        mx.synchronize(generation_stream)
        if self.decoder.stats.num_tokens >= self.max_tokens:
            self._begin()
        self._next_step()
        seconds = timed(self._next_step)
        mx.synchronize(generation_stream)
        return seconds

    def stock_step(self) -> float:
        """One step of stock mlx-lm, likewise."""
        next(self.stock)
        seconds = timed(lambda: next(self.stock))
        mx.synchronize(generation_stream)
        return seconds

    def draft_and_verify(self) -> float:
        """Draft one tree and verify it, each alone, at the length that the decoder has reached."""
        self.cache.settle(self.decoder.cache.length)
        with mx.stream(generation_stream):
            start = time.perf_counter()
            self.tree = self._draft()
            built = time.perf_counter()
            mx.eval(self.tree.arrays)
            drafted = time.perf_counter()
            forward = self.target.verify(self.tree, self.cache)
            verify_built = time.perf_counter()
            mx.eval(forward.logits, forward.hiddens)
            verified = time.perf_counter()
            # Once more, with the rows of two accepted nodes to move as well.
            self.cache.commit([0, 2])
            commit = timed(lambda: mx.eval(*self.target.verify(self.tree, self.cache)))
        self.logits, self.hidden = forward.logits, forward.hiddens[0]
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
        """A forward pass over one token alone."""
        self.cache.settle(self.decoder.cache.length)
        with mx.stream(generation_stream):
            return timed(lambda: mx.eval(*self.target.advance(self.root, self.cache)))

    def accept(self) -> float:
        """Choose and accept, from logits that are there."""

        def work() -> list[int]:
            log_probs = normalise(self.logits)
            length, depths = self.shape.beam_length, self.tree.depths
            noise = self.chooser.noise(mx.array([self.cache.length]), length)
            chosen = self.chooser.choose(log_probs, depths, noise, length)
            path, num_accepted, bonus = accept(self.tree, chosen, self.shape.beam_length)
            return to_ints(mx.concatenate([num_accepted, bonus, path, self.tree.tokens[path]]))

        with mx.stream(generation_stream):
            return timed(work)

    def _begin(self) -> None:
        """Begin the text, in both ways."""
        controller = _ReadShape(self.shape)
        self.decoder = Decoder(
            self.target, self.target.new_cache(), self.chooser, self.drafter, controller
        )
        self.texts.append(self.decoder.stats)
        request = Request(self.prompt, prefill_step_size=PREFILL_STEP)
        self.tokens: Iterator[object] = self.decoder.decode(request)
        prompt = mx.array(self.prompt)
        self.stock = generate_step(
            prompt, self.target.model, max_tokens=-1, prefill_step_size=PREFILL_STEP
        )
        self._next_step()
        next(self.stock)

    def _draft(self) -> TokenTree:
        expansion = expand(self.drafter, self.enter, self.hidden, self.root, self.shape)
        return best_nodes(expansion, self.root, self.shape)

    def _next_step(self) -> None:
        steps = self.decoder.stats.steps
        while self.decoder.stats.steps == steps:
            next(self.tokens)

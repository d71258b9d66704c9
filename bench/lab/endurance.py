"""Soak test: one long text, in which memory and step time must not grow beyond its K/V rows.

Both are measured in windows of tokens. Every window also times forward passes alone at its length.
Attention to a longer text costs the same in both, so their ratio must not grow.

Axes: N nodes of the tree, L beam length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.bench.lab.contexts import PREFILL_STEP, bushy_tree
from mlx_redrafter.bench.lab.memory import Finding, allocated_rows, num_bytes
from mlx_redrafter.bench.lab.rounds import take_turns
from mlx_redrafter.bench.runs import PLAIN, STOCK
from mlx_redrafter.bench.timing import timed
from mlx_redrafter.bench.turns import arm_name
from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.decode import decode
from mlx_redrafter.decoding.protocols import DraftPolicy, Step
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftPlan
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.adaptive import AdaptivePolicy
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Windows that the end is compared with. The first window is left out: it has the first steps.
EARLY = slice(1, 5)
# Minimum number of windows, so that the last quarter begins after those.
MIN_WINDOWS = 8
# Parts of a window, each with its own timing of forward passes alone, so that a busy machine slows
# both down.
PARTS = 4
# Minimum number of tokens per window: two steps per part, even if all drafts are accepted.
MIN_WINDOW = PARTS * 2 * MAX_BEAM_LENGTH
# Nodes of the tree that every window verifies.
FIXED_NODES = 16
# Name of that pass in tables.
FIXED = f"verify({FIXED_NODES})"
# Samples of each forward pass alone, per part.
ROUNDS = 2
# Allowed growth of memory, as a factor.
MEMORY_RATIO = 1.10
# Allowed growth of memory in bytes, if that is more.
MEMORY_BYTES = 8_000_000
# Allowed growth of the ratio of step time to verify time, as a factor.
TIME_RATIO = 1.10


@dataclass(frozen=True)
class Steps:
    """The steps of one plan in a window.

    Attributes:
        seconds: Time of each step.
        alone: Median time of a forward pass over as many nodes alone, at the same lengths, in
            seconds.
    """

    seconds: list[float]
    alone: float

    @property
    def median(self) -> float:
        """Median time of a step, in seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Window:
    """Results of one stretch of the text.

    Attributes:
        length: Tokens in the K/V cache at the window's middle.
        tokens_per_step: Tokens per step of the decoder.
        steps: Steps by the name of their plan, "plain" for plain decoding.
        forwards: Median times of forward passes alone, in seconds: of stock mlx-lm over one token,
            and of a verify over FIXED_NODES nodes.
        memory: Bytes in use at the window's end beyond weights, K/V rows and the benchmark's own.
        peak: Largest number of bytes in use beyond the same.
        kv_bytes: Bytes of the K/V buffers at the window's end.
        kv_rows: Rows of each layer's buffers at the window's end.
    """

    length: int
    tokens_per_step: float
    steps: dict[str, Steps]
    forwards: dict[str, float]
    memory: int
    peak: int
    kv_bytes: int
    kv_rows: int

    @property
    def most_frequent(self) -> str:
        """The plan of most steps."""
        return max(self.steps, key=lambda name: len(self.steps[name].seconds))

    @property
    def seconds_per_token(self) -> float:
        """Time of a token, of the median steps of all plans."""
        counts = [(len(one.seconds), one.median) for one in self.steps.values()]
        step = sum(count * seconds for count, seconds in counts) / sum(count for count, _ in counts)
        return step / self.tokens_per_step

    def ratio(self, name: str | None) -> float:
        """Time of a step relative to its forward pass alone; None takes the steps of all plans."""
        chosen = self.steps.values() if name is None else [self.steps[name]]
        weighted = [(len(one.seconds), one) for one in chosen]
        alone = sum(count * one.alone for count, one in weighted)
        return sum(count * one.median for count, one in weighted) / alone


class Watch:
    """A policy that keeps the step times of another one.

    Attributes:
        seconds: Step times by plan, since `begin`.
    """

    def __init__(self, policy: DraftPolicy):
        self.policy = policy
        self.begin()

    def begin(self) -> None:
        """Forget all steps."""
        self.seconds: dict[DraftPlan | None, list[float]] = {}

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        return self.policy.choose(outlook)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`."""
        return self.policy.keep(plan, tree)

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`."""
        if step.seconds is not None:
            plan = step.plan and DraftPlan(step.plan.shape, step.num_nodes)
            self.seconds.setdefault(plan, []).append(step.seconds)
        self.policy.observe(step)


def endure(
    model: nn.Module,
    drafter: Drafter,
    prompt: Sequence[int],
    plan: DraftPlan | None,
    num_tokens: int,
    window: int,
) -> Iterator[Window]:
    """Decode one text greedily, past its end if necessary, and yield its windows.

    Args:
        model: The target.
        drafter: Drafter of the target.
        prompt: Token ids.
        plan: Plan of every step, with ``select="top_n"``; None for adaptive drafting.
        num_tokens: Tokens to generate; a last window that is not full is left out.
        window: Tokens per window.

    Raises:
        ConfigError: There would be too few windows, or the model's context is too short.
    """
    check_int("window", window, MIN_WINDOW)
    hint = f" ({MIN_WINDOWS} windows of {window})"
    check_int("tokens", num_tokens, MIN_WINDOWS * window, hint=hint)
    target = Target(model)
    limit, total = target.context_length, len(prompt) + num_tokens
    if limit is not None and total > limit:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {num_tokens} generated ones are {total}, the "
            f"model's context is {limit}; generate fewer tokens, or raise it with "
            "the command widen --context"
        )
    return _windows(
        _EnduranceJobs(target, drafter, prompt, plan, total), num_tokens // window, window
    )


def judge(windows: Sequence[Window]) -> list[Finding]:
    """Compare the end of a text with its beginning.

    Args:
        windows: All windows, at least MIN_WINDOWS.
    """
    early, late = windows[EARLY], windows[-(len(windows) // 4) :]
    name = _in_both(early, late)
    found, expected = (
        median(w.ratio(name) for w in part if _has(w, name)) for part in (late, early)
    )
    before = windows[1].memory
    return [
        Finding(
            "memory beyond weights and K/V rows, last window",
            windows[-1].memory / 1e6,
            max(MEMORY_RATIO * before, before + MEMORY_BYTES) / 1e6,
            "MB",
        ),
        Finding(
            f"step by its verify alone, {name or 'all shapes'}, last quarter",
            found,
            TIME_RATIO * expected,
            "",
        ),
    ]


def _in_both(early: Sequence[Window], late: Sequence[Window]) -> str | None:
    """Find the plan with most steps among those in both parts; None if they share none."""
    early_counts, late_counts = (_counts(part) for part in (early, late))
    shared = early_counts.keys() & late_counts.keys()
    return max(shared, key=lambda name: min(early_counts[name], late_counts[name]), default=None)


def _counts(windows: Sequence[Window]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for window in windows:
        for name, steps in window.steps.items():
            counts[name] = counts.get(name, 0) + len(steps.seconds)
    return counts


def _has(window: Window, name: str | None) -> bool:
    return name is None or name in window.steps


def _windows(bench: _EnduranceJobs, count: int, window: int) -> Iterator[Window]:
    for i in range(1, count + 1):
        yield bench.decode_until(i * window)


class _EnduranceJobs:
    """A running decoder, and a second cache for the forward passes that are timed alone."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: Sequence[int],
        plan: DraftPlan | None,
        longest: int,
    ):
        self.target, self.drafter = target, drafter
        proposer = drafter
        chosen = (
            AdaptivePolicy(step_costs(target, proposer, len(prompt)))
            if plan is None
            else FixedPolicy(plan)
        )
        self.watch = Watch(chosen)
        chooser = KeyedSampler(SamplingParams(), target.vocab_size)
        request = Request(list(prompt), prefill_step_size=PREFILL_STEP)
        drafting = proposer.open(target, prompt, True, [])
        self.text = SequenceDecoder(
            target, target.new_cache(), chooser, request, drafting, self.watch
        )
        self.tokens: Iterator[object] = decode(self.text)
        self.beside = target.blank_cache(longest + FIXED_NODES)
        self.root = mx.array([prompt[-1]], dtype=mx.int32)
        self.trees: dict[DraftPlan, TokenTree] = {}
        next(self.tokens)

    def decode_until(self, num_tokens: int) -> Window:
        """Decode up to ``num_tokens`` generated tokens and return the window that ends there."""
        stats, cache = self.text.stats, self.text.own_cache
        tokens, steps, start = stats.num_tokens, stats.steps, cache.length
        self.watch.begin()
        alone: dict[str, list[float]] = {}
        peak = 0
        for part in range(PARTS - 1, -1, -1):
            before = cache.length
            peak = max(peak, self._decode_part(num_tokens - part * (num_tokens - tokens) // PARTS))
            memory = mx.get_active_memory() - self._known_bytes
            for name, seconds in self._time_alone((before + cache.length) // 2).items():
                alone.setdefault(name, []).extend(seconds)
        forwards = {name: median(seconds) for name, seconds in alone.items()}
        forwards[PLAIN] = forwards[STOCK]
        return Window(
            length=(start + cache.length) // 2,
            tokens_per_step=(stats.num_tokens - tokens) / (stats.steps - steps),
            steps={
                _name(plan): Steps(seconds, forwards[_name(plan)])
                for plan, seconds in self.watch.seconds.items()
            },
            forwards={name: forwards[name] for name in (STOCK, FIXED)},
            memory=memory,
            peak=peak,
            kv_bytes=_kv_bytes(cache),
            kv_rows=allocated_rows(cache.stock),
        )

    def _decode_part(self, num_tokens: int) -> int:
        """Decode until there are ``num_tokens``, and return the peak as in `Window`."""
        mx.reset_peak_memory()
        while self.text.stats.num_tokens < num_tokens:
            next(self.tokens)
        mx.synchronize(generation_stream)
        return mx.get_peak_memory() - self._known_bytes

    @property
    def _known_bytes(self) -> int:
        """Bytes of weights, K/V rows and the second cache."""
        return _kv_bytes(self.text.own_cache) + self._constant_bytes

    @cached_property
    def _constant_bytes(self) -> int:
        """Bytes of the weights and of the second cache."""
        return num_bytes(self.target.model) + num_bytes(self.drafter) + _kv_bytes(self.beside)

    def _time_alone(self, length: int) -> dict[str, list[float]]:
        """Seconds of forward passes alone, those of the window's plans by their names."""
        jobs = {
            STOCK: partial(self._forward, length),
            FIXED: partial(self._verify, self._fixed, length),
        }
        for plan in self.watch.seconds:
            if plan is not None:
                jobs[_name(plan)] = partial(self._verify, self._tree(plan), length)
        return take_turns(jobs, ROUNDS, warm_up=1)

    def _forward(self, length: int) -> float:
        """Stock mlx-lm's forward pass over one token."""
        self.beside.settle(length)
        with mx.stream(generation_stream):
            return timed(
                lambda: mx.eval(self.target.model(self.root[None], cache=self.beside.stock))
            )

    def _verify(self, tree: TokenTree, length: int) -> float:
        self.beside.settle(length)
        with mx.stream(generation_stream):
            return timed(lambda: mx.eval(*self.target.verify(tree, self.beside)))

    @cached_property
    def _fixed(self) -> TokenTree:
        return bushy_tree(FIXED_NODES)

    def _tree(self, plan: DraftPlan) -> TokenTree:
        """Make a tree of this plan with arbitrary tokens, which do not change its cost."""
        if plan not in self.trees:
            hidden = mx.zeros((self.target.hidden_size,))
            project_input = input_lookup(self.drafter, self.target)
            expansion = expand(self.drafter, project_input, hidden, self.root, plan.shape)
            self.trees[plan] = best_nodes(expansion, self.root, plan)
            mx.eval(self.trees[plan].arrays)
        return self.trees[plan]


def _name(plan: DraftPlan | None) -> str:
    return PLAIN if plan is None else arm_name(plan)


def _kv_bytes(cache: TreeCache) -> int:
    return sum(layer.nbytes for layer in cache.stock)

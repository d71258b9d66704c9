"""One long text: do memory and the time of a step stay what its K/V rows make of them?

Both are looked at in windows of so many tokens. Every window also times forward passes alone, at
its own length: what attention to a longer text costs is in both, so that their ratio must not grow.

Axes: N nodes of the tree, L beam length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.bench.compare import arm_name
from mlx_redrafter.bench.contexts import PREFILL_STEP, bushy_tree
from mlx_redrafter.bench.memory import Finding, allocated_rows, num_bytes
from mlx_redrafter.bench.runs import PLAIN, STOCK
from mlx_redrafter.bench.timing import take_turns, timed
from mlx_redrafter.config import MAX_BEAM_LENGTH, SamplingParams, TreeShape, check_int
from mlx_redrafter.decoding.sampling import KeyedChooser
from mlx_redrafter.decoding.text import Decoder, Request
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.policy.adaptive import AdaptivePolicy, DraftPolicy, Drafts, FixedPolicy
from mlx_redrafter.policy.profiling import step_costs
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.tree import TokenTree, best_nodes

# The first window has the drafter's first steps in it; the next four are what the end is judged by.
EARLY = slice(1, 5)
# So that the last quarter begins after them.
LEAST_WINDOWS = 8
# TargetOutputs passes alone are timed so many times per window, so that steps and they see the same
# machine, however busy it is.
PARTS = 4
# Every part has two steps, however many drafts are accepted.
LEAST_WINDOW = PARTS * 2 * MAX_BEAM_LENGTH
# Nodes of the tree that every window verifies.
FIXED_NODES = 16
FIXED = f"verify({FIXED_NODES})"
# Samples of each forward pass alone, per part.
ROUNDS = 2
# Allowed growth.
MEMORY_RATIO = 1.10
MEMORY_BYTES = 8_000_000
TIME_RATIO = 1.10


@dataclass(frozen=True)
class Steps:
    """The steps of one shape in a window.

    Attributes:
        seconds: Of each step.
        alone: Median seconds of a forward pass over as many nodes alone, at the same lengths.
    """

    seconds: list[float]
    alone: float

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return median(self.seconds)


@dataclass(frozen=True)
class Window:
    """So many tokens of the text.

    Attributes:
        length: Tokens in the K/V cache at its middle.
        tokens_per_step: Of the decoder.
        steps: By name of the shape, "plain" for plain decoding.
        forwards: Median seconds of forward passes alone: of stock mlx-lm over one token, and of a
            verify over FIXED_NODES nodes.
        memory: Bytes in use at its end beyond weights, K/V rows and what only the benchmark needs.
        peak: The same of the most that was in use.
        kv_bytes: Bytes of the K/V buffers at its end.
        kv_rows: Rows that each layer's buffers have at its end.
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
        """The shape of most steps."""
        return max(self.steps, key=lambda name: len(self.steps[name].seconds))

    def ratio(self, name: str | None) -> float:
        """A step's time by that of its forward pass alone; None takes the steps of all shapes."""
        chosen = self.steps.values() if name is None else [self.steps[name]]
        weighted = [(len(one.seconds), one) for one in chosen]
        alone = sum(count * one.alone for count, one in weighted)
        return sum(count * one.median for count, one in weighted) / alone


class Watch:
    """A controller that keeps the times of another one's steps.

    Attributes:
        seconds: By shape, since `begin`.
    """

    def __init__(self, controller: DraftPolicy):
        self.controller = controller
        self.begin()

    def begin(self) -> None:
        """Forget all steps."""
        self.seconds: dict[TreeShape | None, list[float]] = {}

    def choose(self) -> TreeShape | None:
        """See `DraftPolicy.choose`."""
        return self.controller.choose()

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """See `DraftPolicy.cut`."""
        return self.controller.cut(shape, read)

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """See `DraftPolicy.observe`."""
        if seconds is not None:
            self.seconds.setdefault(shape, []).append(seconds)
        self.controller.observe(shape, accepted, seconds)


def endure(
    model: nn.Module,
    drafter: Drafter,
    prompt: Sequence[int],
    shape: TreeShape | None,
    num_tokens: int,
    window: int,
) -> Iterator[Window]:
    """Decode one text greedily, past its end if need be, and yield its windows.

    Args:
        model: The target.
        drafter: Its drafter.
        prompt: Token ids.
        shape: What is drafted, with ``select="top_n"``; None lets every step choose.
        num_tokens: Tokens to generate; what does not fill a window is left out.
        window: Tokens per window.

    Raises:
        ConfigError: There would be too few windows, or the model's context is too short.
    """
    check_int("window", window, LEAST_WINDOW)
    hint = f" ({LEAST_WINDOWS} windows of {window})"
    check_int("tokens", num_tokens, LEAST_WINDOWS * window, hint=hint)
    target = Target(model)
    limit, total = target.context_length, len(prompt) + num_tokens
    if limit is not None and total > limit:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {num_tokens} generated ones are {total}, the "
            f"model's context is {limit}; ask for fewer tokens, or raise it with "
            "`redrafter-mlx bench widen --context`"
        )
    return _windows(_Bench(target, drafter, prompt, shape, total), num_tokens // window, window)


def judge(windows: Sequence[Window]) -> list[Finding]:
    """Compare the end of a text with its beginning.

    Args:
        windows: All of them, at least LEAST_WINDOWS.
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
    """The shape of most steps among those both parts have; None where they share none."""
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


def _windows(bench: _Bench, count: int, window: int) -> Iterator[Window]:
    for i in range(1, count + 1):
        yield bench.decode_until(i * window)


class _Bench:
    """A running decoder, and a second cache for the forward passes that are timed alone."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: Sequence[int],
        shape: TreeShape | None,
        longest: int,
    ):
        self.target, self.drafter = target, drafter
        chosen = (
            AdaptivePolicy(step_costs(target, drafter, len(prompt)))
            if shape is None
            else FixedPolicy(shape)
        )
        self.watch = Watch(chosen)
        chooser = KeyedChooser(SamplingParams(), target.vocab_size)
        self.decoder = Decoder(target, target.new_cache(), chooser, drafter, self.watch)
        request = Request(list(prompt), prefill_step_size=PREFILL_STEP)
        self.tokens: Iterator[object] = self.decoder.decode(request)
        self.beside = target.blank_cache(longest + FIXED_NODES)
        self.root = mx.array([prompt[-1]], dtype=mx.int32)
        self.trees: dict[TreeShape, TokenTree] = {}
        next(self.tokens)

    def decode_until(self, num_tokens: int) -> Window:
        """The window that ends with so many tokens generated."""
        stats, cache = self.decoder.stats, self.decoder.cache
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
                _name(shape): Steps(seconds, forwards[_name(shape)])
                for shape, seconds in self.watch.seconds.items()
            },
            forwards={name: forwards[name] for name in (STOCK, FIXED)},
            memory=memory,
            peak=peak,
            kv_bytes=_kv_bytes(cache),
            kv_rows=allocated_rows(cache.stock),
        )

    def _decode_part(self, num_tokens: int) -> int:
        """Decode until so many tokens are there, and return the peak as in `Window`."""
        mx.reset_peak_memory()
        while self.decoder.stats.num_tokens < num_tokens:
            next(self.tokens)
        mx.synchronize(generation_stream)
        return mx.get_peak_memory() - self._known_bytes

    @property
    def _known_bytes(self) -> int:
        """Of weights, K/V rows and the second cache."""
        return _kv_bytes(self.decoder.cache) + self._constant_bytes

    @cached_property
    def _constant_bytes(self) -> int:
        """Of the weights and of the second cache."""
        return num_bytes(self.target.model) + num_bytes(self.drafter) + _kv_bytes(self.beside)

    def _time_alone(self, length: int) -> dict[str, list[float]]:
        """Seconds of forward passes alone, those of the window's shapes by their names."""
        jobs = {
            STOCK: partial(self._forward, length),
            FIXED: partial(self._verify, self._fixed, length),
        }
        for shape in self.watch.seconds:
            if shape is not None:
                jobs[_name(shape)] = partial(self._verify, self._tree(shape), length)
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

    def _tree(self, shape: TreeShape) -> TokenTree:
        """Some tree of this shape; which tokens it has does not change what it costs."""
        if shape not in self.trees:
            hidden = mx.zeros((self.target.hidden_size,))
            enter = input_lookup(self.drafter, self.target)
            expansion = expand(self.drafter, enter, hidden, self.root, shape)
            self.trees[shape] = best_nodes(expansion, self.root, shape)
            mx.eval(self.trees[shape].arrays)
        return self.trees[shape]


def _name(shape: TreeShape | None) -> str:
    return PLAIN if shape is None else arm_name(shape)


def _kv_bytes(cache: TreeCache) -> int:
    return sum(layer.nbytes for layer in cache.stock)

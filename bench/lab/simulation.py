"""Simulated texts for policies: what would be accepted, and what it would cost.

A position of a simulated text always gets the same drafts, so all policies meet the same text, and
a fixed plan's run is known without decoding it.

Axes: W beam width, L beam length, N nodes of a tree, M drafts of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.lab.scenarios import FIRST_TEXT, LEVELS, QUIET, SECOND_TEXT, Scenario
from mlx_redrafter.decoding.protocols import DraftPolicy, Step
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.policy.plans import LENGTHS, StepCosts
from mlx_redrafter.trees.tree import Drafts

Floats = npt.NDArray[np.float64]
# From times of steps and the policy of the text before to the policy of a text.
Begin = Callable[[StepCosts, Any], DraftPolicy]

# Continuations of a node that are simulated, and tokens that share the rest of its probability.
CHILDREN = 6
TAIL = 200


class SimulatedText:
    """The drafts at every position of a scenario's text; ``children`` of a node are simulated."""

    children = CHILDREN

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self._levels = cache(self._draw_levels)
        self.drafts = cache(self._search)

    def tokens(self, start: int, stop: int) -> list[int]:
        """The text's own tokens."""
        return list(range(start, stop))

    def _draw_levels(self, position: int) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
        """For every level: log-probabilities on the path and off it, and which child is right.

        Returns:
            Log-probabilities of children of the right node, (LEVELS, CHILDREN); the index of the
            right child, CHILDREN where it is none, (LEVELS,); log-probabilities off the path.
        """
        scenario = self.scenario
        rng = np.random.default_rng((scenario.seed, position))
        depths = np.arange(LEVELS)
        ahead = np.minimum(position + depths, len(scenario.ease) - 1)
        both = []
        for _ in range(2):
            own = scenario.ease[ahead] - scenario.fade * depths + rng.normal(0.0, 1.0, LEVELS)
            top = 1 / (1 + np.exp(-own))
            rest = top[:, None] * rng.uniform(0.2, 0.7, (LEVELS, 1)) ** np.arange(1, self.children)
            rest *= np.minimum(1.0, 0.95 * (1 - top) / rest.sum(axis=1))[:, None]
            both.append(np.concatenate([top[:, None], rest], axis=1))
        on, off = both
        right = (rng.random((LEVELS, 1)) > np.cumsum(on, axis=1)).sum(axis=1)
        return self._scores(on), right, self._scores(off)

    def _scores(self, chances: Floats) -> Floats:
        tail = np.maximum(1 - chances.sum(axis=1, keepdims=True), 1e-9) / TAIL
        logits = self.scenario.score_scale * np.log(np.concatenate([chances, tail], axis=1))
        most = logits.max(axis=1, keepdims=True)
        mass = np.exp(logits - most)
        mass[:, -1] *= TAIL
        return logits[:, :-1] - most - np.log(mass.sum(axis=1, keepdims=True))

    def _search(self, position: int, width: int) -> Drafts:
        """All drafts of the longest search of this width, best first."""
        on, right, off = self._levels(position)
        count = DraftShape(width, 2).level_nodes
        # Node: score, depth, parent's index, token; -1 stands for the root.
        found: list[tuple[float, int, int, int]] = []
        beams, start = [(0.0, -1, True)], position + 1
        for level in range(LENGTHS[-1] - 1):
            options = [
                (score + (on if is_right else off)[level, child], node, child, is_right)
                for score, node, is_right in beams
                for child in range(self.children)
            ]
            options.sort(key=lambda option: -option[0])
            beams = []
            for score, node, child, is_right in options[:count]:
                hits = is_right and child == right[level]
                index = len(found)
                token = start + level if hits else -(index + 1)
                found.append((score, level + 1, node, token))
                if len(beams) < width:
                    beams.append((score, index, hits))
        order = sorted(range(len(found)), key=lambda node: -found[node][0])
        place = {-1: 0} | {node: i + 1 for i, node in enumerate(order)}
        nodes = [found[node] for node in order]
        return Drafts(
            scores=[score for score, _, _, _ in nodes],
            depths=[depth for _, depth, _, _ in nodes],
            parents=[place[parent] for _, _, parent, _ in nodes],
            tokens=[token for _, _, _, token in nodes],
        )


class SimulatedTree:
    """What a policy may ask of a tree; see `TokenTree`."""

    find_others = None

    def __init__(self, drafts: Drafts, size: int | None = None):
        self._drafts = drafts
        self.num_nodes = len(drafts.tokens) + 1
        self.size = size or self.num_nodes

    def read(self) -> Drafts:
        return self._drafts

    def padded(self, size: int) -> SimulatedTree:
        return SimulatedTree(self._drafts, size)

    def first(self, num_nodes: int) -> SimulatedTree:
        return self.subtree(range(num_nodes - 1))

    def subtree(self, drafts: Sequence[int], among: Drafts | None = None) -> SimulatedTree:
        return SimulatedTree((among or self._drafts).chosen(drafts))


def run_policy(
    text: SimulatedText, policy: DraftPolicy, start: int, stop: int, seed: int = 0
) -> float:
    """Seconds that a policy takes from one position of a text to another.

    The plan of a step is chosen before the step in flight is observed, as in decoding. The policy
    sees every step's time as it was; counted are those of its steps at their mean, as in
    `run_fixed`: luck is not the policy's.
    """
    scenario = text.scenario
    rng = np.random.default_rng((scenario.seed, seed))
    position, seconds, chosen = start, 0.0, policy.choose(None)
    while position < stop:
        num_nodes, size, num_accepted, is_read = 1, 1, 0, False
        if chosen is not None:
            drafts = text.drafts(position, chosen.shape.width)
            short = [i for i, depth in enumerate(drafts.depths) if depth < chosen.shape.length]
            tree: Any = SimulatedTree(drafts).subtree(short[: chosen.searched.num_nodes - 1])
            kept = policy.select(chosen, tree)
            is_read = policy.waits  # type: ignore[attr-defined]
            num_nodes, size = kept.num_nodes, kept.size
            num_accepted = sum(token > 0 for token in kept.read().tokens)
        shape = None if chosen is None else chosen.shape
        undisturbed = scenario.seconds(position, shape, size, is_read)
        took = undisturbed * QUIET.draw(rng)
        seconds += undisturbed * QUIET.mean
        following = policy.choose(None)
        emitted = text.tokens(position + 1, position + num_accepted + 2)
        policy.observe(Step(chosen, num_nodes, emitted, took))
        position, chosen = position + num_accepted + 1, following
    return seconds * (stop - start) / (position - start)


def run_fixed(text: SimulatedText, plan: DraftPlan | None, start: int, stop: int) -> float:
    """Seconds that a fixed plan takes, or plain decoding, those of its steps at their mean."""
    position, seconds, scenario = start, 0.0, text.scenario
    shape, num_nodes = (None, 1) if plan is None else (plan.shape, plan.num_nodes)
    while position < stop:
        seconds += QUIET.mean * scenario.seconds(position, shape, num_nodes, waits=False)
        if shape is not None:
            drafts = text.drafts(position, shape.width)
            inside = [
                token
                for token, depth in zip(drafts.tokens, drafts.depths, strict=True)
                if depth < shape.length
            ]
            position += sum(token > 0 for token in inside[: num_nodes - 1])
        position += 1
    return seconds * (stop - start) / (position - start)


# Such pairs of texts per scenario; the best fixed plan is that of all of them.
TEXTS = 3
# Fixed plans that a policy is compared with, beside plain decoding.
FIXED = (
    *(DraftPlan.of(1, length, length) for length in (2, 3, 4, 5, 6, 8, 10)),
    *(DraftPlan.of(2, length, size) for length in (3, 4, 5, 6, 8) for size in (4, 6, 8, 16)),
    *(DraftPlan.of(4, length, size) for length in (3, 5, 8) for size in (8, 16, 32)),
)


class Outcome(NamedTuple):
    """A policy's speed, and that of the best fixed plan in hindsight, by plain decoding's.

    ``best`` is None for plain decoding.
    """

    scenario: str
    speed: float
    best: DraftPlan | None
    best_speed: float

    @property
    def regret(self) -> float:
        """Share of the best fixed plan's speed that the policy lacks; below 0 where it has more."""
        return 1 - self.speed / self.best_speed


def play_first(
    scenario: Scenario, begin: Begin, forget: Callable[[Any], Any]
) -> tuple[float, float]:
    """Let a policy decode the first text of a process, which fixed plans decode, too.

    ``forget`` makes what a second process begins with from the policy of the first one. Return the
    speeds in both, by those of the best fixed plan.
    """
    start, stop, seconds = FIRST_TEXT, 2 * FIRST_TEXT, np.zeros(2)
    fixed: dict[DraftPlan | None, float] = dict.fromkeys((None, *FIXED), 0.0)
    for seed in range(TEXTS):
        text = SimulatedText(replace(scenario, seed=TEXTS * scenario.seed + seed))
        first = begin(scenario.timed, None)
        run_policy(text, first, 0, FIRST_TEXT)
        for i, before in enumerate((None, forget(first))):
            seconds[i] += run_policy(text, begin(scenario.timed, before), start, stop, seed=1)
        for plan in fixed:
            fixed[plan] += run_fixed(text, plan, start, stop)
    one, two = (min(fixed.values()) / seconds).tolist()
    return one, two


def play(
    scenario: Scenario, begin: Begin, make_text: Callable[[Scenario], SimulatedText] = SimulatedText
) -> Outcome:
    """Let a policy decode a scenario's two texts, and every fixed plan the second one.

    ``begin`` makes the policy of a text from the times of steps and the policy of the text before.
    """
    stop, seconds = FIRST_TEXT + SECOND_TEXT, 0.0
    fixed: dict[DraftPlan | None, float] = dict.fromkeys((None, *FIXED), 0.0)
    for seed in range(TEXTS):
        text = make_text(replace(scenario, seed=TEXTS * scenario.seed + seed))
        first = begin(scenario.timed, None)
        run_policy(text, first, 0, FIRST_TEXT)
        seconds += run_policy(text, begin(scenario.timed, first), FIRST_TEXT, stop, seed=1)
        for plan in fixed:
            fixed[plan] += run_fixed(text, plan, FIRST_TEXT, stop)
    best = min(fixed, key=fixed.__getitem__)
    plain = fixed[None]
    return Outcome(scenario.name, plain / seconds, best, plain / fixed[best])

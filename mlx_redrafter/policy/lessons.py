"""What the adaptive policy learns from, until it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.awaited_drafts import AwaitedDrafts
from mlx_redrafter.policy.candidates import PLACES, SIZES
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.prices import Prices
from mlx_redrafter.policy.seen_drafts import SeenDrafts
from mlx_redrafter.policy.step_costs import StepCosts

# What a verify takes at least of its timed seconds, whatever its drafts are thought to take.
LEAST_VERIFYING = 0.5


class Taken(NamedTuple):
    """A step whose time is learnt from, or several as one.

    Attributes:
        step: The step.
        is_inner: Whether it stood between two of its kind, with drafts or without, and the host did
            not learn meanwhile, unless from drafts in use.
        waits: Whether the drafts were looked at before they were verified.
        num_steps: Number of steps.
    """

    step: Step
    is_inner: bool
    waits: bool
    num_steps: int


class Outcome(NamedTuple):
    """Drafts of a text that are learnt from, and its tokens.

    Attributes:
        seen: Drafts of a network, if there were any and there is time to learn from them.
        tokens: Tokens of the step.
        awaited: Earlier drafts of the text.
    """

    seen: SeenDrafts | None
    tokens: Sequence[int]
    awaited: AwaitedDrafts


def together(steps: Sequence[Step]) -> Step:
    """Plain steps in a row as one, with the tokens of all and the time of the typical one.

    Args:
        steps: The steps, one at least.
    """
    seconds = sorted(step.seconds for step in steps if step.seconds is not None)
    typical = seconds[len(seconds) // 2] if seconds else None
    return Step(None, 1, [token for step in steps for token in step.tokens], typical)


def learn_time(taken: Taken, costs: StepCosts, prices: Prices, experience: Experience) -> None:
    """Learn from a step's time how slow steps are at present.

    Args:
        taken: The step, or several.
        costs: Seconds of steps as timed beforehand.
        prices: Seconds that they were thought to take.
        experience: Gets the slowdowns.
    """
    seconds, plan, num_nodes = taken.step.seconds, taken.step.plan, taken.step.num_nodes
    if seconds is None:
        return
    if plan is None:
        if taken.is_inner:
            ratio = max(LEAST_VERIFYING, seconds / costs.plain)
            experience.slowdowns.learn(1, ratio, taken.num_steps)
        return
    if plan.from_text and costs.level:
        # Where nothing is found, the device has waited for the host all the same.
        verify = prices.plain if num_nodes == 1 else prices.verify[SIZES.index(num_nodes)]
        expected = verify + costs.wait
        experience.lookups.learn(1, max(1.0, seconds / expected))
        if seconds > expected:  # which says nothing of a network's trees
            return
    if not taken.is_inner:
        return
    shape = None if plan.from_text else plan.shape
    wait = costs.wait if taken.waits and shape is not None else 0.0
    if num_nodes > 1:
        drafting = 0.0 if shape is None else prices.drafting.item(PLACES[shape])
        timed = costs.step(None, num_nodes, waits=False)
        verifying = max(LEAST_VERIFYING * timed, seconds - drafting - wait)
        experience.slowdowns.learn(num_nodes, verifying / timed)
    elif shape is not None:
        drafting = prices.timed_drafting.item(PLACES[shape]) * experience.slowdowns.of(1)
        experience.in_vain.learn(1, seconds / (prices.plain + drafting + wait))

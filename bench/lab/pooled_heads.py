"""Drafters of one kind from results of the command ``heads``: means and ranges over seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

# End of a drafter's name that gives its seed, as in ``medusa-2``.
SEED = re.compile(r"-\d+$")


class Spread(NamedTuple):
    """Values of drafters that differ in their seed.

    Attributes:
        mean: Mean.
        low: Minimum.
        high: Maximum.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Compute the spread of the values that are known; None if none is."""
        known = [value for value in values if value is not None]
        return cls(mean(known), min(known), max(known)) if known else None

    def text(self, form: str = ".2f") -> str:
        """Format the mean, and the range if it is not empty."""
        if self.low == self.high:
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} ({self.low:{form}}-{self.high:{form}})"


class HeadGroup(NamedTuple):
    """Key of drafters that differ only in their seed.

    Attributes:
        model: Name of the target.
        kind: See `Head.kind` in `heads`; else the name without a seed.
        trained_tokens: See `Head` in `heads`.
        temp: Temperature.
    """

    model: str
    kind: str
    trained_tokens: int | None
    temp: float


@dataclass(frozen=True)
class PooledHead:
    """A kind of drafter with one budget of training, at a temperature.

    Attributes:
        group: Settings that its drafters share.
        num_seeds: Number of its drafters.
        bytes: Bytes of the weights of the first one.
        drafting: Time of a chain's drafts by that of a plain step.
        chain_tokens: Tokens per step with chains.
        chain_speed: Speed with chains by that of mlx-lm.
        default_tokens: Tokens per step of the default.
        default_speed: Speed of the default by that of mlx-lm.
    """

    group: HeadGroup
    num_seeds: int
    bytes: int
    drafting: Spread | None
    chain_tokens: Spread | None
    chain_speed: Spread | None
    default_tokens: Spread | None
    default_speed: Spread | None


def pool(results: Iterable[Mapping[str, Any]]) -> list[PooledHead]:
    """Pool the drafters of several results over seeds, in order of their groups.

    A drafter in several results counts once for each of them.

    Args:
        results: Contents of result files.
    """
    found: dict[HeadGroup, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for result in results:
        model = result["configuration"]["model"]
        costs = {cost["name"]: cost for cost in result["found"]["costs"]}
        for row in result["found"]["rows"]:
            cost = costs[row["name"]]
            kind = cost.get("kind") or SEED.sub("", row["name"])
            group = HeadGroup(model, kind, cost["trained_tokens"], row["temp"])
            found.setdefault(group, []).append((cost, row))
    order = sorted(found, key=lambda one: (one.model, one.temp, one.kind, one.trained_tokens or 0))
    return [_pool(group, found[group]) for group in order]


def _pool(
    group: HeadGroup, drafters: list[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> PooledHead:
    costs, rows = [cost for cost, _ in drafters], [row for _, row in drafters]

    def tokens(way: str) -> Spread | None:
        return Spread.of(row[way]["tokens_per_step"] for row in rows)

    def speed(way: str) -> Spread | None:
        speeds = (row[way]["speedup"] for row in rows)
        return Spread.of(None if one is None else one["median"] for one in speeds)

    return PooledHead(
        group,
        len({cost["name"] for cost in costs}),
        costs[0]["bytes"],
        Spread.of(_drafting(cost) for cost in costs),
        tokens("chain"),
        speed("chain"),
        tokens("default"),
        speed("default"),
    )


def _drafting(cost: Mapping[str, Any]) -> float:
    """See `HeadCost.drafting` in `heads`."""
    seconds = cost["first"] + (cost["chain"] - 1) * cost["level"]
    return float(max(0.0, seconds) / cost["plain"])

"""Drafts of one text that more of it may prove right or wrong."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_redrafter.policy.calibration import Calibration
from mlx_redrafter.policy.hindsight import Hindsight
from mlx_redrafter.policy.seen_drafts import SeenDrafts


class AwaitedDrafts:
    """The drafts of a text whose paths it has not left yet."""

    def __init__(self) -> None:
        self._open: list[tuple[SeenDrafts, Hindsight]] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, seen: SeenDrafts) -> None:
        """Take in the drafts of a step, before its tokens."""
        self._open.append((seen, Hindsight(seen.drafts)))

    def teach(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """Let a calibration know which drafts these next tokens prove right or wrong."""
        for seen, hindsight in self._open:
            calibration.add(seen.features, hindsight.follow(tokens))
        self._open = [one for one in self._open if not one[1].is_over]

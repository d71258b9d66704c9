"""What the adaptive policy learns from, until it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.awaited_drafts import AwaitedDrafts
from mlx_redrafter.policy.seen_drafts import SeenDrafts


class Taken(NamedTuple):
    """A step whose time is learnt from.

    Attributes:
        step: The step.
        is_inner: Whether it stood between two of its kind, with drafts or without, and the host did
            not learn meanwhile.
        waits: Whether the drafts were looked at before they were verified.
    """

    step: Step
    is_inner: bool
    waits: bool


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

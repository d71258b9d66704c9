"""How many tokens drafts out of the text bring, by how many the lookup has promised."""

from __future__ import annotations

# Promised tokens that are believed at first, and window of those counted, in lookups.
BELIEVED, MEMORY = 4.0, 16


class Promises:
    """Ratio of accepted drafts to those promised, over the newest lookups that were chosen.

    Those are the ones that promised most, so the ratio corrects that choice, too.

    Args:
        before: Promises of the text before, of which half count.
    """

    def __init__(self, before: Promises | None = None) -> None:
        self._promised: float = 0.0 if before is None else before._promised / 2
        self._kept: float = 0.0 if before is None else before._kept / 2

    @property
    def share(self) -> float:
        """Tokens to expect of a promised one."""
        return (BELIEVED + self._kept) / (BELIEVED + self._promised)

    def learn(self, promised: float, kept: int) -> None:
        """Take in a lookup: the expected number of accepted drafts, and their number."""
        self._promised += promised - self._promised / MEMORY
        self._kept += kept - self._kept / MEMORY

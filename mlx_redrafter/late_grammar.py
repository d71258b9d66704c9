"""Grammars that begin at a marker within a text, such as the marker of a tool call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_redrafter.grammar import Grammar


@dataclass(frozen=True)
class LateGrammar:
    """Grammars of the text after a marker, by marker; until one comes, all tokens are allowed.

    With ``is_last`` the text ends where the grammar ends. Otherwise all tokens are allowed from
    there to the next marker, so the grammar must end in a way that nothing can extend.
    ``may_end_before`` is whether the text may end without a marker.
    """

    grammars: Mapping[str, Grammar]
    is_last: bool = False
    may_end_before: bool = True

"""Proposers of draft tokens: a folder or a file for each kind, with the names of `Kind`.

A new kind is a folder and an entry in `KINDS`. The files beside the folders are shared by kinds: a
kind imports them, and never another kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_redrafter.proposers import draft_model, eagle, lookup, medusa, mtp, redrafter, specformer
from mlx_redrafter.proposers.kind import Kind

# Every kind that `load` reads.
KINDS: tuple[Kind, ...] = (redrafter, eagle, medusa, mtp, specformer, draft_model, lookup)
# Kinds that a word stands for, instead of a folder or repository.
WORDS: Mapping[str, Kind] = {"lookup": lookup, "mtp": mtp}

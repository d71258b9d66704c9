"""Proposers of draft tokens: a folder or a file for each kind, with the names of `Kind`.

A new kind is a folder and an entry in `KINDS`. Kinds import the files next to the folders, and
never another kind. `speculate_ahead` is no kind: it wraps proposers of two kinds.
"""

from collections.abc import Mapping

from mlx_redrafter.proposers import (
    assistant,
    block,
    draft_model,
    eagle,
    lookup,
    medusa,
    mtp,
    redrafter,
    specformer,
)
from mlx_redrafter.proposers.kind import Kind

# Every kind that `load` reads.
KINDS: tuple[Kind, ...] = (
    redrafter, eagle, medusa, mtp, block, specformer, assistant, draft_model, lookup,
)  # fmt: skip
# Kinds that a word stands for, instead of a folder or repository.
WORDS: Mapping[str, Kind] = {"lookup": lookup, "mtp": mtp}

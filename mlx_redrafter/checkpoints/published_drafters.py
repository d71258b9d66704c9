"""Table of drafters that others have published, by the model they were made for."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlx_redrafter.checkpoints.identity import Identity

# The table: tab-separated, with a line of headings.
TABLE = Path(__file__).with_name("drafters.tsv")
# Names of methods for messages.
METHODS = {
    "assistant": "Gemma 4 assistant",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "eagle3": "EAGLE-3",
}


class PublishedDrafter(NamedTuple):
    """A line of the table: the repositories of a model and of a drafter for it.

    ``method`` is a key of `METHODS`. ``licence`` is empty if the sources do not state it, and
    ``gain``, the speed relative to plain decoding and whose figure it is, if it is unknown.
    ``source`` names the texts that name the pair.
    """

    target: str
    drafter: str
    method: str
    licence: str
    gain: str
    source: str


@cache
def read_table() -> tuple[PublishedDrafter, ...]:
    """Read the table; of one target, the preferred drafter comes first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return tuple(PublishedDrafter(*row) for row in rows[1:])


def published_for(model: Identity, table: Iterable[PublishedDrafter]) -> list[PublishedDrafter]:
    """Return the published drafters of a model, the preferred one first."""
    return [line for line in table if model.is_named(line.target)]

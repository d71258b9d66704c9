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
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "eagle3": "EAGLE-3",
}


class PublishedDrafter(NamedTuple):
    """A line of the table.

    Attributes:
        target: Repository of the model that it was made for.
        drafter: Repository of the drafter.
        method: Its method, a key of `METHODS`.
        licence: Its licence; empty if the sources do not state it.
        gain: Speed relative to plain decoding, and whose figure it is; empty if unknown.
        source: Texts that name the pair.
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

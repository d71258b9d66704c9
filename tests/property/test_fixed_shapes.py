"""Fixed shapes give the texts and the steps that were recorded before the code was rebuilt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.record_fixed_shapes import FILE, SAMPLINGS, SHAPES, record

ROWS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_shape_is_recorded() -> None:
    assert len(ROWS) == len(SHAPES) * len(SAMPLINGS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['shape']}-{row['sampling']}")
def test_texts_and_steps_are_as_recorded(row: dict[str, Any]) -> None:
    assert record(tuple(row["shape"]), row["sampling"]) == row["found"]

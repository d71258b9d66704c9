"""Fixed shapes give the texts and the steps that were recorded before the code was rebuilt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.record_fixed_shapes import FILE, PROMPTS, SAMPLINGS, SHAPES, record

ROWS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_shape_is_recorded() -> None:
    assert len(ROWS) == len(SHAPES) * len(SAMPLINGS)


# The prompts in turn; the recording script compares both.
@pytest.mark.parametrize(("number", "row"), list(enumerate(ROWS)))
def test_texts_and_steps_are_as_recorded(number: int, row: dict[str, Any]) -> None:
    which = number % len(PROMPTS)
    found = record(PROMPTS[which], tuple(row["shape"]), row["sampling"])
    assert found == row["found"][which], row

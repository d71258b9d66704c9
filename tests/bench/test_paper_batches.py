"""Cells of the papers' batch tables: what they measure, and the tables they make."""

from __future__ import annotations

import pytest

from mlx_redrafter.bench.lab.paper_batches import (
    LENGTH,
    PLAIN,
    Cell,
    cells,
    counted_cells,
    measure,
    tables,
)
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama

PROMPTS = [[5, 9, 7], [3, 60, 9, 12]]


def test_a_cell_without_merging_counts_the_nodes_that_merging_saves() -> None:
    target, drafter = Target(tiny_llama(seed=5, vocab_size=64)), random_drafter(64, 32)
    found = {
        is_merged: measure(
            Cell("recurrent", 2, 4, 4, None, is_merged), target, drafter, PROMPTS, steps=3
        )
        for is_merged in (True, False)
    }
    for one in found.values():
        assert one["tokens_per_second"] > 0
        assert one["tokens_per_step"] == pytest.approx(found[True]["tokens_per_step"])
        assert 0 < one["saved"] < 1, "beams share prefixes"
    plain = measure(Cell(PLAIN, 2), target, None, PROMPTS, steps=3)
    assert plain["tokens_per_step"] == 1


def test_every_cell_has_a_place_in_the_tables() -> None:
    """Each cell's number is its own, so that all of them can be found again."""
    names = ["recurrent", "Medusa"]
    all_cells = [*cells(names, 64), *(cell for cell in counted_cells() if cell.length != LENGTH)]
    assert len({cell.name for cell in all_cells}) == len(set(all_cells))
    found = {
        cell.name: {"tokens_per_second": 1000.0 + i, "kappa": 0.5, "saved": i / 1000}
        for i, cell in enumerate([*all_cells, Cell("recurrent", 8, 32, LENGTH)])
    }
    page = "\n".join(tables(found, names))
    assert page.count("0.50") == len([cell for cell in set(all_cells) if cell.num_nodes])
    assert "|  |" not in page.replace("| plain |  |", "")

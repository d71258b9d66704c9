"""The page of results is what its result files say."""

import re

import pytest

from mlx_redrafter.bench.lab.commands.tables import (
    FOLDER,
    PAGES,
    TABLE,
    TABLES,
    fill,
    read_results,
    without_raw_numbers,
)
from mlx_redrafter.errors import CheckpointError

TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
FOUND = read_results(FOLDER)


def test_the_tables_are_those_of_the_results():
    for text in TEXTS:
        assert fill(text, FOUND) == text, "run python -m mlx_redrafter.bench.lab tables"


def test_every_table_is_on_one_page():
    names = [found[2] for text in TEXTS for found in TABLE.finditer(text)]
    assert sorted(names) == sorted(TABLES)


def test_a_result_that_changes_changes_its_row():
    page = "before\n<!-- table: prediction -->\nold\n<!-- end -->\nafter\n"
    found = {"x": {"kind": "predict validation", "found": [
        {"chip": "M9", "errors": [0.1, -0.2, 0.3], "best": [{"share": 0.9}, {"share": 0.8}]}
    ]}}  # fmt: skip
    filled = fill(page, found)
    assert "| M9 | 3 | 20.0% | +10.0% | +30.0% | 80.0% |\n<!-- end -->\nafter" in filled
    assert "old" not in filled
    assert fill(filled, found) == filled


def test_result_files_hold_only_what_tables_read():
    assert [name for name, result in FOUND.items() if without_raw_numbers(result) != result] == []


def test_a_table_that_there_is_not_is_named():
    with pytest.raises(CheckpointError, match="found 'sped'"):
        fill("<!-- table: sped -->\n<!-- end -->", {})


def test_texts_of_results_are_the_targets_own():
    found = [one for one in FOUND.values() if one["kind"] == "throughput"]
    assert found
    assert not any(row["num_different"] for one in found for row in one["rows"])


def test_every_file_of_results_is_read_by_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in FOLDER.parents[1].rglob("*.md"))
    folder = FOLDER / "linux-2-cores"
    unread = [
        one.name for one in folder.iterdir() if not re.search(rf"linux-2-cores/{one.stem}\b", pages)
    ]
    assert unread == []


def test_pages_are_short():
    for text in TEXTS:
        assert len(text.splitlines()) <= 120
        lines = [line for line in text.splitlines() if not line.startswith("|")]
        assert max(map(len, lines)) <= 160

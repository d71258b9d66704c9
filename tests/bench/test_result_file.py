"""Result files say what was measured on what, survive a round trip, and fill the pages' tables."""

import json
import os
import re
import subprocess

import pytest

from mlx_redrafter.bench import machine
from mlx_redrafter.bench.lab.commands.tables import (
    FOLDER,
    PAGES,
    TABLE,
    TABLES,
    fill,
    read_results,
    without_raw_numbers,
)
from mlx_redrafter.bench.result_file import new_result, pair_names, read_result, write_result
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.checkpoints.bundled import checkpoint_name
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.redrafter.precision import quantised_copy
from tests.helpers.hostile import no_room
from tests.helpers.models import random_drafter


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "result.json"
    result = new_result("overhead", {"beam_width": 4}, share=estimate([0.5]))
    write_result(path, result)
    found = read_result(path, "overhead")
    assert found["share"]["median"] == 0.5
    assert found["configuration"] == {"beam_width": 4}
    assert found["versions"]["mlx"]
    assert found["machine"]["processor"]
    assert "commit" in found
    assert str(tmp_path) not in json.dumps(found)
    with pytest.raises(CheckpointError, match=r"'memory'.*found 'overhead'"):
        read_result(path, "memory")
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_result(path, "overhead")
    assert checkpoint_name(str(tmp_path)) == tmp_path.name
    assert checkpoint_name("org/name") == "org/name"


def test_a_commit_is_one_of_this_code(tmp_path, monkeypatch):
    """A repository around an installed package is the user's."""

    def git(*arguments):
        names = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", tmp_path, *names, *arguments], check=True, capture_output=True)

    installed = tmp_path / "site-packages" / "mlx_redrafter" / "bench" / "machine.py"
    own = tmp_path / "bench" / "machine.py"
    for folder in (installed.parent, own.parent, tmp_path / "mlx_redrafter"):
        folder.mkdir(parents=True)
    own.write_text("")
    git("init")
    git("add", "bench")
    git("commit", "-m", "x")
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.commit() is None
    monkeypatch.setattr(machine, "__file__", str(own))
    head = machine.commit()
    assert re.fullmatch("[0-9a-f]{40}", head)
    os.utime(own, (0, 0))  # so that the index is not up to date
    with no_room():
        assert machine.commit() == head
    assert not (tmp_path / ".git" / "index.lock").exists()
    own.write_text("edited")
    assert machine.commit() == f"{head}+changes"


def test_lists_of_numbers_take_one_line(tmp_path):
    path = tmp_path / "result.json"
    values = {"tokens": [1, -2.5e-07, 3], "names": ["a\n1", "[ 2,\n3 ]"], "empty": []}
    write_result(path, {"kind": "x", **values})
    assert '"tokens": [ 1, -2.5e-07, 3 ]' in path.read_text()
    assert read_result(path, "x") == {"kind": "x", **values}


def test_a_drafter_that_was_quantised_when_it_was_loaded_is_told_from_itself():
    drafter = random_drafter(64, 32)
    found = pair_names(None, "org/drafter", drafter)
    assert found == {"model": "bundled", "drafter": "org/drafter", "drafter_bits": None}
    assert pair_names(None, "org/drafter", quantised_copy(drafter))["drafter_bits"] == 8


# The page of results

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

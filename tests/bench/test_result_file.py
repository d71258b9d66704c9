"""Result files say what was measured on what, and survive a round trip."""

import json
import re
import subprocess

import pytest

from mlx_redrafter.bench import machine
from mlx_redrafter.bench.result_file import (
    checkpoint_name,
    new_result,
    pair_names,
    read_result,
    write_result,
)
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.redrafter.precision import quantised_copy
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

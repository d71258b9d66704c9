"""Texts of models that are split over ranks of this machine, against those of one process."""

import json
from pathlib import Path

import pytest

from mlx_redrafter.bench.lab.ranks import started
from tests.machines.proposers import store

pytestmark = pytest.mark.timeout(600)  # ranks have a limit of their own
# Kinds of proposers to try, as all of them take minutes: one that reads the target's states, and a
# module of another target.
TRIED = "EAGLE-3", "MTP"


def _rows(*arguments: str, size: int = 2) -> dict[str, dict[str, bool]]:
    """Checks by what was tried, from a script on ranks."""
    with started(["-m", *arguments], size) as ranks:
        ended = ranks.wait()
    assert [one.code for one in ended] == [0] * size, ended
    rows = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith("{")]
    return {row["what"]: row["checks"] for row in rows}


def test_two_ranks_write_what_one_process_writes():
    families = ("llama", "qwen3_5")
    found = _rows("tests.machines.families", *families, "tokens=12")
    assert found.keys() == set(families)
    assert all(all(checks.values()) for checks in found.values()), found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    store(folder)
    return folder


@pytest.mark.parametrize("kind", TRIED)
def test_proposers_batches_and_caches_on_two_ranks(kind, folder):
    """Without timing every shape of drafts first; steps on two ranks are timed in `test_serve`."""
    found = _rows("tests.machines.proposers", str(folder), kind, "untimed", "tokens=10")
    assert found.keys() == {"no drafts", kind}
    assert all(all(checks.values()) for checks in found.values()), found


def test_sums_in_rank_order_keep_drafted_texts_plain_on_three_ranks():
    words = "llama", "dtype=bfloat16", "tokens=12"
    found = _rows("tests.machines.families", *words, size=3)["llama"]
    assert all(found[check] for check in ("drafted", "batch", "kept"))

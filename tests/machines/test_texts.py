"""Texts of models that are split over ranks of this machine, against those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_redrafter.bench.lab.ranks import started
from tests.machines.proposers import store

# Kinds of proposers to try, as all of them take a minute, with the number of results: one that
# reads the target's states, and a module of another target.
TRIED = {"EAGLE-3": 5, "MTP": 3}


def _families(*arguments: str, size: int) -> list[dict[str, object]]:
    with started(["-m", "tests.machines.families", *arguments], size) as ranks:
        ended = ranks.wait()
    assert [one.code for one in ended] == [0] * size, ended
    return [json.loads(line) for line in ended[0].out.splitlines()]


def _is_exact(found: dict[str, object]) -> bool:
    return all(found[name] is True for name in ("alone", "drafted", "batch", "kept"))


def test_two_ranks_write_what_one_process_writes() -> None:
    families = ("llama", "qwen3_5")
    found = _families(*families, size=2)
    assert [one["family"] for one in found] == list(families)
    assert all(map(_is_exact, found)), found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    store(folder)
    return folder


@pytest.mark.parametrize("kind", TRIED)
def test_proposers_batches_and_caches_on_two_ranks(kind: str, folder: Path) -> None:
    with started(["-m", "tests.machines.proposers", str(folder), kind], 2) as ranks:
        ended = ranks.wait()
    assert [one.code for one in ended] == [0, 0], ended
    found = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith("{")]
    assert len(found) == TRIED[kind]
    wrong = [one for one in found if not all(value for value in one.values())]
    assert wrong == []


def test_sums_in_rank_order_keep_drafted_texts_plain_on_three_ranks() -> None:
    (found,) = _families("llama", "dtype=bfloat16", size=3)
    assert found["drafted"] is True
    assert found["batch"] is True

"""Texts of models that are split over ranks of this machine, against those of one process."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_redrafter.bench.lab.ranks import started
from tests.machines.proposers import store

# Kinds of proposers to try, as all of them take a minute: one that reads the target's states.
TRIED = ("EAGLE-3",)


def _families(*arguments: str, size: int) -> list[dict[str, object]]:
    with started(["-m", "tests.machines.families", *arguments], size) as ranks:
        ended = ranks.wait()
    assert [one.code for one in ended] == [0] * size, ended
    return [json.loads(line) for line in ended[0].out.splitlines()]


def _is_exact(found: dict[str, object]) -> bool:
    return all(found[name] is True for name in ("alone", "drafted", "batch"))


def test_two_ranks_write_what_one_process_writes() -> None:
    families = ("llama", "qwen3_5")
    found = _families(*families, size=2)
    assert [one["family"] for one in found] == list(families)
    assert all(map(_is_exact, found)), found


def test_proposers_batches_and_caches_on_two_ranks(tmp_path: Path) -> None:
    store(tmp_path)
    with started(["-m", "tests.machines.proposers", str(tmp_path), *TRIED], 2) as ranks:
        ended = ranks.wait()
    assert [one.code for one in ended] == [0, 0], ended
    found = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith("{")]
    assert len(found) == len(TRIED) + 3
    wrong = [one for one in found if not all(value for value in one.values())]
    assert wrong == []


def test_sums_in_rank_order_keep_drafted_texts_plain_on_three_ranks() -> None:
    (found,) = _families("llama", "dtype=bfloat16", size=3)
    assert found["drafted"] is True
    assert found["batch"] is True

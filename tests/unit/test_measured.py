"""Stored timings: one disturbed moment does not decide for good, and doubt costs one later run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_redrafter.measured import doubt, fastest, load_or_time

KEYS = ("few", "many")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _run(few: float, many: float, is_doubtful: bool = False) -> dict[str, float] | None:
    """Load the fastest times, or time them as given; None without new times."""
    timed: list[dict[str, float]] = []

    def time_rounds() -> Sequence[dict[str, float]]:
        timed.append({"few": few, "many": many})
        return timed

    rounds = load_or_time("what", [], KEYS, lambda _: is_doubtful, time_rounds)
    return fastest(rounds) if timed else None


@pytest.mark.parametrize("in_use", [False, True])
def test_doubt_costs_one_later_run_and_both_count(in_use: bool) -> None:
    assert _run(1.0, 9.0, is_doubtful=not in_use) == {"few": 1.0, "many": 9.0}
    if in_use:
        assert _run(0.1, 0.1) is None
        doubt("what", [], KEYS)
    assert _run(5.0, 2.0, is_doubtful=True) == {"few": 1.0, "many": 2.0}
    assert _run(0.1, 0.1) is None
    assert load_or_time("what", [], KEYS, lambda _: True, list)[1] == {"few": 5.0, "many": 2.0}


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert _run(1.0, 2.0) == {"few": 1.0, "many": 2.0}
            doubt("what", [], KEYS)
    assert "not kept" in caplog.text

"""Step times: which there are, and that a second run reads them instead of timing again."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter import costs
from mlx_redrafter.controller import CANDIDATES
from mlx_redrafter.drafter_io import quantize_drafter
from mlx_redrafter.target import Target
from tests.helpers.models import random_drafter, tiny_llama


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-redrafter"


def test_every_shape_is_timed_once_per_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = Target(tiny_llama()), random_drafter(64, 32)
    seconds = costs.step_costs(target, drafter)
    assert set(seconds) == {None, *CANDIDATES}
    assert all(value > 0 for value in seconds.values())
    assert len(list(folder.iterdir())) == 1

    monkeypatch.setattr(costs, "time_steps", lambda *_: pytest.fail("timed again"))
    assert costs.step_costs(target, drafter) == seconds


def test_another_drafter_or_dtype_is_timed_anew(folder: Path) -> None:
    target, drafter = Target(tiny_llama()), random_drafter(64, 32)
    costs.step_costs(target, drafter)
    quantize_drafter(drafter, 4, 32)
    costs.step_costs(target, drafter)
    costs.step_costs(target, random_drafter(64, 32, dtype=mx.float16))
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plain": "fast"}'])
def test_a_damaged_file_is_replaced(folder: Path, text: str) -> None:
    target, drafter = Target(tiny_llama()), random_drafter(64, 32)
    seconds = costs.step_costs(target, drafter)
    (path,) = folder.iterdir()
    path.write_text(text)
    costs.step_costs(target, drafter)
    assert costs.step_costs(target, drafter).keys() == seconds.keys()
    assert path.read_text() != text


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        costs.step_costs(Target(tiny_llama()), random_drafter(64, 32))
    assert "not kept" in caplog.text


def test_timing_leaves_the_model_alone() -> None:
    model = tiny_llama()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = model(tokens)
    costs.time_steps(Target(model), random_drafter(64, 32))
    assert mx.array_equal(model(tokens), before)

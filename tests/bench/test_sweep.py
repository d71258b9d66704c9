"""Grids, and what survives an interruption."""

import pytest

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import TimedRun
from mlx_redrafter.bench.sweep import Grid
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError


def test_grid_leaves_out_what_cannot_be():
    # Of width 1 one per length, of width 2 two, and four of beams.
    plans = Grid((1, 2), (2, 3), (None, 7)).plans
    assert DraftPlan.of(2, 3, 7) in plans
    assert DraftPlan.of(2, 3, select="beam") in plans
    assert len(plans) == len(set(plans)) == 10
    with pytest.raises(ConfigError, match="fewer nodes"):
        Grid((1,), (2,), (9,), ("top_n",))


def test_a_grid_that_would_take_weeks_is_refused():
    with pytest.raises(ConfigError, match="at most 1000 shapes, got 1024"):
        Grid(tuple(range(1, 65)), tuple(range(2, 18)), selections=("top_n",))


def make_run(repeat):
    return TimedRun("g", 0, "a", "p", "c", repeat, 5, 0.5, 1.0, [1, 2], [1], 2, 2)


def test_recordings_go_on(tmp_path):
    path = tmp_path / "r.json"
    first = Recording(path, "sweep", {"seed": 1})
    first.add([make_run(0)])
    with pytest.raises(ConfigError, match="--resume"):
        Recording(path, "sweep", {"seed": 1})
    second = Recording(path, "sweep", {"seed": 1}, resume=True)
    assert second.runs == [make_run(0)]
    assert second.has(("g", 0, "p", 0))
    assert not second.has(("g", 0, "p", 1))
    second.add([make_run(1)])
    third = Recording(path, "sweep", {"seed": 1}, resume=True)
    assert len(third.runs) == 2
    assert len(third.result["sittings"]) == 3
    with pytest.raises(ConfigError, match="measured with seed 1, now it is 2"):
        Recording(path, "sweep", {"seed": 2}, resume=True)
    path.write_text(path.read_text().replace('"num_unmerged"', '"num_plain"'))
    with pytest.raises(ConfigError, match="another version of this program"):
        Recording(path, "sweep", {"seed": 1}, resume=True)

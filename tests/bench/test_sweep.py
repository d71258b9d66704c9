"""Grids, casts, and what survives an interruption."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import Run
from mlx_redrafter.bench.sweep import Grid, _Cast
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.redrafter.network import Drafter


def test_grid_leaves_out_what_cannot_be():
    # Of width 1 one per length, of width 2 two, and four of beams.
    plans = Grid((1, 2), (2, 3), (None, 7)).plans
    assert DraftPlan.of(2, 3, 7) in plans
    assert DraftPlan.of(2, 3, select="beam") in plans
    assert len(plans) == len(set(plans)) == 10
    with pytest.raises(ConfigError, match="fewer nodes"):
        Grid((1,), (2,), (9,), ("top_n",))
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, got 'int8'"):
        Grid((1,), (2,), dtypes=("int8",))


def test_casts_start_from_the_first_weights(pair):
    drafter = Drafter(pair[1].config)
    drafter.update(pair[1].parameters())
    before = dict(tree_flatten(drafter.parameters()))
    cast = _Cast(drafter)
    cast.to("float16")
    assert drafter.dtype == mx.float16
    cast.to("bfloat16")
    expected = before["rnn_w.weight"].astype(mx.bfloat16)
    assert mx.array_equal(drafter.rnn_w.weight, expected)
    cast.to("float32")
    assert mx.array_equal(drafter.rnn_w.weight, before["rnn_w.weight"])


def make_run(repeat):
    return Run("g", 0, "a", "p", "c", repeat, 5, 0.5, 1.0, [1, 2], [1], 2, 2)


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

"""Grids, and what survives an interruption."""

import json
from functools import partial

import pytest

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt, TimedRun, Turn
from mlx_redrafter.bench.sweep import Grid
from mlx_redrafter.bench.turns import Interleaving, decode_in_turns
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, ConfigError


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
    whole = path.read_text()
    path.write_text(whole.replace('"num_unmerged"', '"num_plain"'))
    with pytest.raises(ConfigError, match="another version of this program"):
        Recording(path, "sweep", {"seed": 1}, resume=True)
    machine = json.loads(whole)["machine"]
    path.write_text(whole.replace(json.dumps(machine["processor"]), '"M1"', 1))
    with pytest.raises(ConfigError, match="measured with processor 'M1', now it is"):
        Recording(path, "sweep", {"seed": 1}, resume=True)
    for part in ('"runs"', '"versions"', '"sittings"', '"machine"'):
        path.write_text(whole.replace(part, '"lost"'))
        with pytest.raises(CheckpointError, match="is damaged"):
            Recording(path, "sweep", {"seed": 1}, resume=True)


def test_every_round_starts_with_another_method():
    """The rounds may share anything else, such as the block of a sweep's shapes."""
    order = []

    def make_methods(settings):
        def decode(name, batch):
            order.append(name)
            measured = {"prompt_seconds": 1.0, "decode_seconds": 1.0, "tokens": [1, 2]}
            return [(turn.run(name, **measured), "") for turn in batch]

        return {name: partial(decode, name) for name in "abc"}

    prompts = [EncodedPrompt(name, "", [1]) for name in "pqr"]
    batches = [[Turn("g", 0, prompt, repeat)] for repeat in range(2) for prompt in prompts]
    settings = CommonSettings(None, None, None, max_tokens=2)
    recording = Recording(None, "sweep", {})
    decode_in_turns([Interleaving(make_methods, settings, batches)], recording)
    warm_up, rounds = order[:3], order[3:]
    assert warm_up == ["a", "b", "c"]
    assert "".join(rounds[::3]) == "abcbca"
    assert [run.arm for run in recording.runs] == 6 * ["a", "b", "c"]

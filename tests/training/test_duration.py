"""Duration of a run: amounts of work times the pace of the machine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_redrafter.checkpoint_files import UNFINISHED
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.training import DataOptions, TrainingOptions, TrainingRequest, resources
from mlx_redrafter.training.duration import Pace, Timetable, Workload, format_time
from mlx_redrafter.training.resources import (
    GROWING_CACHES,
    ResourceEstimate,
    TargetSize,
    check_minutes,
    check_resources,
    estimate,
)
from mlx_redrafter.training.self_generated import CACHE_STEP, ROUND_BYTES, ROUND_SIZE

REQUEST = TrainingRequest(
    "model",
    Path("none"),
    data=[Path("texts")],
    data_options=DataOptions(answer_tokens=100),
    training=TrainingOptions(epochs=2, batch_tokens=300, num_evaluations=8),
)
WORK = Workload.of(REQUEST, given=1000, generated=500, prompt=10, num_held_out=2)
PACE = Pace(0.1, reading=0.01, step=3.0, measuring=0.04, calibration=0.1)


def test_the_work_of_a_request() -> None:
    assert WORK == Workload(
        1000,
        500,
        held_out=200,
        prompts=80,
        steps=10,
        batch_tokens=300,
        num_evaluations=8,
        text_tokens=110,
    )
    assert WORK.tokens == 1780


def test_every_stage_counts() -> None:
    timetable = Timetable.of(WORK, PACE, None)
    # 3,000 tokens are trained on: 7 measurements, each after 4 times the tokens that it takes.
    # These and the first one, and after training another and a calibration.
    assert timetable.num_evaluations == 7
    evaluation = 100 * (8 * 0.04 + 0.04 + 0.1)
    stages = {"reading": 10.0, "generating": 70.8, "training": 30.0, "evaluation": evaluation}
    assert timetable.stages == pytest.approx(stages)
    assert str(timetable) == (
        "about 3 min: reading 10 s, generating 71 s, training 30 s, evaluation 46 s"
    )


def test_calibration_looks_at_so_many_tokens_only() -> None:
    many = replace(WORK, held_out=100_000)
    costs = [
        Timetable.of(many, replace(PACE, calibration=c), None).stages["evaluation"] for c in (0, 1)
    ]
    assert costs[1] - costs[0] == pytest.approx(4096)


def test_minutes_are_for_all_stages() -> None:
    timetable = Timetable.of(WORK, PACE, 5)
    assert timetable.total == pytest.approx(300)
    # A quarter of the time is 75 s: after the 14 at the end, enough for 14 measurements.
    assert timetable.num_evaluations == 8
    assert timetable.stages["training"] == pytest.approx(300 - 70 - 10.8 - 50)
    check_minutes(timetable, 5)
    # 250 s before the evaluation, of which 100 are gone.
    assert timetable.count_steps(5, elapsed=100) == round(150 / 3)
    assert timetable.count_steps(5, elapsed=1000) == 25, "the minimum share, however late it is"


def test_short_runs_are_measured_less_often_and_too_short_ones_refused() -> None:
    # 45 s for evaluation: 14 at the end, 31 for the first and six more of 4 s each.
    assert Timetable.of(WORK, PACE, 3).num_evaluations == 6
    short = Timetable.of(WORK, PACE, 2)
    assert short.num_evaluations == 3
    stages = r"\(reading 10 s, generating 71 s, evaluation 30 s\); give more --minutes"
    with pytest.raises(ResourceError, match=rf"--minutes 2 is for the whole run.* {stages}"):
        check_minutes(short, 2)


def test_times_are_short() -> None:
    assert [format_time(t) for t in (3.4, 99, 100, 5900, 36_000)] == [
        "3 s",
        "99 s",
        "2 min",
        "98 min",
        "10.0 h",
    ]


def test_complete_shards_need_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ResourceEstimate(0, cache=60, drafter=0, disk=100, memory=0)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=70))
    out = tmp_path.with_name("out")
    (tmp_path / f"{UNFINISHED}abcdefgh.safetensors").write_bytes(bytes(40))
    with pytest.raises(ResourceError, match=r"0\.0 MB of disk"):
        check_resources(needed, tmp_path, out)
    (tmp_path / "train-00000.safetensors").write_bytes(bytes(40))
    check_resources(needed, tmp_path, out)
    (tmp_path / "states-0-1-2.safetensors").write_bytes(bytes(90))
    with pytest.raises(ResourceError, match="of disk"):
        check_resources(replace(needed, disk=140), tmp_path, out)


def test_a_cache_on_another_disk_leaves_the_drafter_to_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    out.mkdir()
    needed = ResourceEstimate(0, cache=60, drafter=0, disk=100, memory=0)
    free = {cache: 60, out: 40}
    monkeypatch.setattr(resources, "read_device", lambda path: hash(path))
    monkeypatch.setattr(
        resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path])
    )
    check_resources(needed, cache, out)
    for folder in free:
        free[folder] -= 1
        with pytest.raises(ResourceError, match=f"of disk in {folder}, found"):
            check_resources(needed, cache, out)
        free[folder] += 1


def test_the_memory_of_a_run_includes_the_caches_of_a_round() -> None:
    work = replace(WORK, text_tokens=2 * CACHE_STEP)
    size = TargetSize(64, 100, weight_bytes=10**9)
    peaks = [
        estimate(work, replace(size, cache_bytes=one), num_weights=1000).memory
        for one in (0, 2**24, 2**30)
    ]
    assert peaks[0] < 3e9
    for peak, texts, one in ((peaks[1], ROUND_SIZE, 2**24), (peaks[2], 3, 2**30)):
        assert texts * one <= ROUND_BYTES
        assert 0 <= peak - 10**9 - 2 * GROWING_CACHES * texts * one < 10**8

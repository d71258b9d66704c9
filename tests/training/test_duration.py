"""Duration of a run: amounts of work times the pace of the machine, which a rehearsal finds."""

from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.checkpoint_files import UNFINISHED
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.target.target import Target, is_slow
from mlx_redrafter.training import (
    DataOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
    new_student,
    rehearsal,
    resources,
)
from mlx_redrafter.training.duration import Pace, Timetable, Workload, format_time
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.resources import (
    GROWING_CACHES,
    ResourceEstimate,
    TargetSize,
    check_minutes,
    check_resources,
    estimate,
)
from mlx_redrafter.training.self_generated import CACHE_STEP, ROUND_BYTES, ROUND_SIZE
from mlx_redrafter.training_options import RECIPES
from tests.helpers.calls import at_call
from tests.helpers.models import tiny_llama

REQUEST = TrainingRequest(
    "model",
    Path("none"),
    data=[Path("texts")],
    data_options=DataOptions(answer_tokens=100),
    training=TrainingOptions(epochs=2, batch_tokens=300, num_evaluations=8),
)
WORK = Workload.of(REQUEST, given=1000, generated=500, prompt=10, num_held_out=2)
PACE = Pace(0.1, reading=0.01, step=3.0, measuring=0.04, calibration=0.1)


def test_the_work_of_a_request():
    counts = {"held_out": 200, "prompts": 80, "steps": 10, "num_evaluations": 8}
    assert WORK == Workload(1000, 500, **counts, batch_tokens=300, text_tokens=110)
    assert WORK.tokens == 1780


@pytest.mark.parametrize(
    ("cache", "left"),
    [
        ((0, 0, False), (1000, 500, 200, 80)),
        ((400, 0, False), (600, 500, 200, 80)),
        ((1290, 50, False), (50, 250, 200, 40)),
        ((9999, 0, False), (0, 0, 200, 0)),
        ((1300, 90, True), (90, 0, 0, 0)),
    ],
)
def test_what_a_cache_holds_is_not_done_again(cache, left):
    assert WORK.left(*cache) == Workload(*left, *astuple(WORK)[4:])


def test_every_stage_counts():
    timetable = Timetable.of(WORK, PACE, None)
    # 3,000 tokens are trained on: 7 measurements, each after 4 times the tokens that it takes.
    # These and the first one, and after training another and a calibration.
    assert timetable.num_evaluations == 7
    evaluation = 100 * (8 * 0.04 + 0.04 + 0.1)
    stages = {"reading": 10.0, "generating": 70.8, "training": 30.0, "evaluation": evaluation}
    assert timetable.stages == pytest.approx(stages)
    parts = "reading 10 s, generating 71 s, training 30 s, evaluation 46 s"
    assert str(timetable) == f"about 3 min: {parts}"


def test_calibration_looks_at_so_many_tokens_only():
    many = replace(WORK, held_out=100_000)
    paces = (replace(PACE, calibration=seconds) for seconds in (0, 1))
    free, costly = (Timetable.of(many, pace, None).stages["evaluation"] for pace in paces)
    assert costly - free == pytest.approx(4096)


def test_minutes_are_for_all_stages():
    timetable = Timetable.of(WORK, PACE, 5)
    assert timetable.total == pytest.approx(300)
    # A quarter of the time is 75 s: after the 14 at the end, enough for 14 measurements.
    assert timetable.num_evaluations == 8
    assert timetable.stages["training"] == pytest.approx(300 - 70 - 10.8 - 50)
    check_minutes(timetable, 5)
    # 250 s before the evaluation, of which 100 are gone.
    assert timetable.count_steps(5, elapsed=100) == round(150 / 3)
    assert timetable.count_steps(5, elapsed=1000) == 25, "the minimum share, however late it is"


def test_short_runs_are_measured_less_often_and_too_short_ones_refused():
    # 45 s for evaluation: 14 at the end, 31 for the first and six more of 4 s each.
    assert Timetable.of(WORK, PACE, 3).num_evaluations == 6
    short = Timetable.of(WORK, PACE, 2)
    assert short.num_evaluations == 3
    stages = r"\(reading 10 s, generating 71 s, evaluation 30 s\); give more --minutes"
    with pytest.raises(ResourceError, match=rf"--minutes 2 is for the whole run.* {stages}"):
        check_minutes(short, 2)


def test_times_are_short():
    times = {3.4: "3 s", 99: "99 s", 100: "2 min", 5900: "98 min", 36_000: "10.0 h"}
    assert [format_time(seconds) for seconds in times] == list(times.values())


def test_complete_shards_need_no_more_disk(tmp_path, monkeypatch):
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


def test_a_cache_on_another_disk_leaves_the_drafter_to_its_own(tmp_path, monkeypatch):
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


def test_the_memory_of_a_run_includes_the_caches_of_a_round():
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


# The rehearsal

REHEARSED = replace(REQUEST, data_options=DataOptions(), training=TrainingOptions(batch_tokens=64))


REHEARSALS = {
    **{recipe: {"training": replace(REHEARSED.training, recipe=recipe)} for recipe in RECIPES},
    "short contexts and a reduced head": {
        "network": NetworkOptions(exit_dim=8, length=2, draft_vocab=5),
        "data_options": DataOptions(sequence_length=16, temp=0.0),
    },
}


@pytest.mark.parametrize("changes", REHEARSALS.values(), ids=REHEARSALS)
def test_every_stage_takes_time(target, changes):
    request, stages = replace(REHEARSED, **changes), list[int]()
    student, prompts = new_student(target, request.network), [[1, 2, 3], [2] * 40]
    pace = rehearse(request, target, student, prompts, 0, lambda done, _: stages.append(done))
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2, 3, 4}
    assert all(seconds > 0 for seconds in astuple(pace))


def test_what_is_timed_is_like_the_run(target, monkeypatch):
    """Texts are read that are as long as can be, and go on from half of a text of the run."""
    read: list[list[int]] = []
    written: list[tuple[int, int, int]] = []

    def note_texts(target: Target, sequences: list[Any], *_: Any) -> None:
        read.append([len(one) for one in sequences])

    def note_jobs(generator: Any, jobs: Any, options: DataOptions, *_: Any) -> None:
        (length,) = {len(one.prompt) for one in jobs}
        written.append((len(jobs), length, options.answer_tokens))

    at_call(monkeypatch, rehearsal, "read_sequences", note_texts)
    at_call(monkeypatch, rehearsal.TextGenerator, "generate_round", note_jobs)
    student = new_student(target, NetworkOptions("eagle"))
    rehearse(REHEARSED, target, student, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], 10**6, lambda *_: None)
    assert written == [(128, (9 + 256) // 2, 16)]
    assert read == [[8] * 8, [64] * 8], "the first pass is not timed"
    short = replace(REHEARSED, data_options=DataOptions(sequence_length=32))
    rehearse(short, target, student, [[1] * 9], 5000, lambda *_: None)
    assert written[1] == (20, 16, 16), "as many texts at once as in the run"
    assert read[3] == [32] * 8


def test_half_precision_on_a_cpu_is_slow():
    on_cpu = "cpu" in str(mx.default_device())
    model = tiny_llama()
    for dtype, slow in (mx.float32, False), (mx.float16, on_cpu), (mx.bfloat16, on_cpu):
        model.set_dtype(dtype)
        assert is_slow(Target(model)) == slow
    nn.quantize(model, 32, class_predicate=lambda _, layer: isinstance(layer, nn.Embedding))
    assert not is_slow(Target(model))

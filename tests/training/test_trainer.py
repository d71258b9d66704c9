"""The training loop: the same end however it is interrupted, and what it refuses."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.errors import CheckpointError, NonFiniteError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import DataOptions, NetworkOptions, TrainingOptions, train_drafter
from mlx_redrafter.training import trainer as trainer_module
from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.files import load_arrays, save_arrays
from mlx_redrafter.training.initial import compute_head_matrix
from mlx_redrafter.training.state import STATE_FILE, TrainingProgress
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.students.student_kinds import new_student
from mlx_redrafter.training.teacher import Teacher
from mlx_redrafter.training.teacher_cache import TeacherCache
from mlx_redrafter.training.trainer import Trainer
from mlx_redrafter.training.training_request import STATE_FOLDER, TrainingRequest
from mlx_redrafter.training_options import RECIPES, Head, Recipe
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import shared_path, tiny_llama
from tests.training.pieces import Silent, random_texts

OPTIONS = TrainingOptions(epochs=2, batch_tokens=32, num_evaluations=4, checkpoint_seconds=0)


class TrainingSetup:
    """A tiny target with a filled cache."""

    def __init__(self, folder: Path):
        self.target = Target(tiny_llama())
        texts = random_texts([24] * 10, given=4)
        self.cache = TeacherCache(folder / "cache", {})
        for head in ("redrafter", "eagle", "dspark"):
            layers = self.new_student(head).layers
            for split, part in ("train", texts[:8]), ("held-out", texts[8:]):
                Teacher(self.target, self.cache, split, 8, layers).read(part, lambda n: None)

    def new_student(self, head: Head) -> Student:
        exit_dim = 16 if head == "redrafter" else None
        return new_student(self.target, NetworkOptions(head, exit_dim=exit_dim, length=4))

    def trainer(self, folder: Path, recipe: Recipe = "soft", **more: Any) -> Trainer:
        """Create a trainer that continues the run in ``folder``, if any."""
        options, identity = more.get("options", OPTIONS), more.get("identity", '{"a": 1}')
        student = self.new_student(more.get("head", "redrafter"))
        student.initialise(compute_head_matrix(self.target), 0)
        stretch = 16 if student.reads_context else 1
        batch_options = BatchOptions(4, options.batch_tokens, options.seed, stretch, student.layers)
        order = BatchOrder(self.cache, "train", batch_options)
        held_out = self.cache.load("held-out", 0, student.layers)
        request = TrainingRequest(
            "m", folder, data=[folder], resume=True, training=replace(options, recipe=recipe)
        )
        steps = more.get("total_steps")
        return Trainer(student, order, held_out.texts, request, identity, steps)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainingSetup:
    return TrainingSetup(tmp_path_factory.mktemp("setup"))


def _ignore(value: object) -> None:
    pass


def _stop_at(*steps: int) -> Callable[[TrainingProgress], None]:
    def check(progress: TrainingProgress) -> None:
        if progress.step in steps:
            raise KeyboardInterrupt

    return check


def _assert_close(first: Student, second: Student, atol: float) -> None:
    pairs = (tree_flatten(one.network.parameters()) for one in (first, second))
    for (name, a), (_, b) in zip(*pairs, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=atol, err_msg=str(name))


def _assert_same_state(*folders: Path) -> None:
    first, second = (load_arrays(folder / STATE_FOLDER / STATE_FILE)[0] for folder in folders)
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[name], second[name]).item() for name in first)


@pytest.mark.parametrize(
    ("recipe", "head"),
    [*((recipe, "redrafter") for recipe in RECIPES), ("coupled", "medusa"), ("soft", "eagle")],
)
def test_recipes_learn(setup, tmp_path, recipe, head):
    options = TrainingOptions(epochs=8, batch_tokens=32, num_evaluations=4, lr=1e-2)
    trainer = setup.trainer(tmp_path, recipe, options=options, head=head)
    trainer.run(_ignore, _ignore)
    losses = [point.loss for point in trainer.progress.curve[1:]]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.progress.step == trainer.progress.total_steps


@pytest.mark.parametrize("head", ["redrafter", "eagle", "dspark"])
def test_interrupted_and_resumed_is_the_same_as_undisturbed(setup, tmp_path, head):
    whole = setup.trainer(tmp_path / "whole", head=head)
    expected = whole.run(_ignore, _ignore)
    for step in (1, 7):
        with pytest.raises(KeyboardInterrupt):
            setup.trainer(tmp_path / "parts", head=head).run(_stop_at(step), _ignore)
    trainer = setup.trainer(tmp_path / "parts", head=head)
    assert trainer.progress.step == 7
    assert_same_weights(trainer.run(_ignore, _ignore).network, expected.network)
    _assert_same_state(tmp_path / "whole", tmp_path / "parts")
    rates = [
        [(p.step, p.loss, p.tokens_per_step) for p in t.progress.curve][1:]
        for t in (whole, trainer)
    ]
    assert rates[0] == rates[1]


def test_a_finished_run_is_not_trained_again(setup, tmp_path):
    expected = setup.trainer(tmp_path).run(_ignore, _ignore)
    steps: list[TrainingProgress] = []
    found = setup.trainer(tmp_path).run(steps.append, _ignore)
    assert_same_weights(found.network, expected.network)
    assert not steps


def test_a_run_with_other_options_is_refused(setup, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        setup.trainer(tmp_path).run(_stop_at(1), _ignore)
    with pytest.raises(CheckpointError, match="a: expected 2, found 1"):
        setup.trainer(tmp_path, identity='{"a": 2}')
    path = tmp_path / STATE_FOLDER / STATE_FILE
    arrays, metadata = load_arrays(path)
    del metadata["format"]
    old = tmp_path / "old"
    save_arrays(old / STATE_FOLDER / STATE_FILE, arrays, metadata)
    with pytest.raises(CheckpointError, match=r"expected a training state of format 5, found .* 1"):
        setup.trainer(old)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"cannot read .*delete it"):
        setup.trainer(tmp_path)


def test_a_diverging_run_is_stopped(setup, tmp_path):
    trainer = setup.trainer(tmp_path)
    network = trainer.student.network
    network.rnn_w.weight = network.rnn_w.weight * float("nan")
    with pytest.raises(NonFiniteError, match=r"the loss became nan at step 1; .* --cache .*cache"):
        trainer.run(_ignore, _ignore)


def test_parts_of_a_batch_give_the_same_step(setup, tmp_path, monkeypatch):
    options = TrainingOptions(epochs=1, batch_tokens=32, num_evaluations=1)
    whole = setup.trainer(tmp_path / "a", options=options).run(_ignore, _ignore)
    monkeypatch.setattr(trainer_module, "LOGITS_BYTES", 4 * 64 * 3 * 5)  # five positions at a time
    parts = setup.trainer(tmp_path / "b", options=options).run(_ignore, _ignore)
    _assert_close(whole, parts, 2e-4)


def test_compiled_steps_are_the_same_steps(setup, tmp_path, monkeypatch):
    """Compile as on a GPU; here MLX compiles with the C++ compiler of the system."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("MLX compiles for the CPU with a C++ compiler, and there is none")
    options = TrainingOptions(epochs=1, batch_tokens=32, num_evaluations=1, checkpoint_seconds=0)
    plain = setup.trainer(tmp_path / "a", options=options).run(_ignore, _ignore)
    monkeypatch.setattr(trainer_module, "compiling_pays", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        setup.trainer(tmp_path / "b", options=options).run(_stop_at(2), _ignore)
    trainer = setup.trainer(tmp_path / "b", options=options)
    compiled = trainer.run(_ignore, _ignore)
    assert trainer.progress.step == trainer.progress.total_steps
    _assert_close(plain, compiled, 1e-4)


def test_the_number_of_steps_may_be_given(setup, tmp_path):
    options = replace(OPTIONS, num_evaluations=2)
    trainer = setup.trainer(tmp_path, options=options, total_steps=6)
    trainer.run(_ignore, _ignore)
    assert [point.step for point in trainer.progress.curve] == [0, 3, 6]
    again = setup.trainer(tmp_path, options=options, total_steps=9)
    assert again.progress.total_steps == 6, "that of the state"


def test_patience_ends_a_run_that_does_not_improve(setup, tmp_path):
    options = TrainingOptions(epochs=50, batch_tokens=32, num_evaluations=100, patience=2, lr=1e-9)
    trainer = setup.trainer(tmp_path, options=options)
    trainer.run(_ignore, _ignore)
    assert len(trainer.progress.curve) == 52, "the first, those of the first half, and two"
    assert trainer.progress.is_done


# A run that is killed again and again ends in the same files as one that is not

TIMEOUT = 250


def _train(text: Path, out: Path) -> None:
    more: Any = {"num_evaluations": 3, "patience": 99, "checkpoint_seconds": 0}
    options: Any = {
        "network": NetworkOptions(exit_dim=64, layers=1),
        "data_options": DataOptions(tokens=800, answer_tokens=32, held_out=4),
        "training": TrainingOptions(epochs=2, batch_tokens=64, **more),
    }
    model = str(shared_path("models/stories260k"))
    train_drafter(TrainingRequest(model, out, data=[text], resume=True, **options), Silent())


def _start(*paths: Path) -> SpawnProcess:
    process = get_context("spawn").Process(target=_train, args=paths, daemon=True)
    process.start()
    return process


@pytest.mark.timeout(600)
def test_killed_at_random_moments_and_resumed(stories_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = _start(stories_file, whole)
    rng = random.Random(4)
    # While the target writes, and while the drafter learns.
    for path in (parts / "cache" / "train-00001.safetensors", parts / STATE_FOLDER / STATE_FILE):
        process = _start(stories_file, parts)
        while not path.exists():
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for process in (_start(stories_file, parts), undisturbed):
        process.join(TIMEOUT)
        assert process.exitcode == 0
    _assert_same_state(whole, parts)
    for name in ("model.safetensors", "config.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert not list(parts.rglob(".*"))

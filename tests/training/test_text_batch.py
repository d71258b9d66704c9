"""Texts that the target writes many at once are those that it writes one by one."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import (
    DataOptions,
    Teacher,
    TeacherCache,
    TextGenerator,
    TokenSequence,
    teacher_outputs,
)
from mlx_redrafter.training.self_generated import GenerationJob
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training.text_batch import answer, sample
from tests.helpers.models import tiny_llama
from tests.training.pieces import MODELS

STOP = 7


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"llama4"}))  # in no batch of mlx-lm
def test_greedy_texts_are_those_of_mlx_lm(name: str) -> None:
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, length).tolist() for length in (1, 9, 4, 23, 2)]
    most = [30, 4, 30, 12, 1]
    counts: list[int] = []
    found = answer(Target(model), prompts, [0.0] * 5, most, [STOP], counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == sum(map(len, found))
    for prompt, text, longest in zip(prompts, found, most, strict=True):
        assert len(text) == longest or text[-1] == STOP
        steps = generate_step(mx.array(prompt), model, max_tokens=len(text))
        assert text == [int(token) for token, _ in steps]


def test_every_pass_can_be_interrupted() -> None:
    """A report between passes may end the work: prompts, answers, and reading."""
    target, prompts = Target(tiny_llama()), [[1] * 40] * 32
    counts: list[int] = []

    def stop(count: int) -> None:
        counts.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(target, prompts, [0.0] * 32, [8] * 32, [], stop)
    assert counts == [0], "after the first part of the prompts"
    texts = [TokenSequence(np.ones(90, np.int32), np.ones(90, np.bool_)) for _ in range(20)]
    read: list[int] = []
    read_sequences(target, texts, 4, (), read.append)
    assert read == [0, 0, 720, 720, 1440], "of 8 texts at once, 64 tokens of each"


def test_every_text_has_its_own_temperature() -> None:
    logits = mx.log(mx.array([[0.6, 0.3, 0.1]] * 4000))
    mx.random.seed(0)
    found = np.array(to_ints(sample(logits, [0.0, 1.0, 0.5, 1e-4] * 1000))).reshape(-1, 4)
    assert not found[:, [0, 3]].any()
    shares = [np.bincount(column, minlength=3) / 1000 for column in found.T]
    np.testing.assert_allclose(shares[1], [0.6, 0.3, 0.1], atol=0.05)
    np.testing.assert_allclose(shares[2], np.array([36, 9, 1]) / 46, atol=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_what_generating_keeps_is_what_reading_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last token of a generated text is in no pass, and no drafter reads its outputs."""
    monkeypatch.setattr(teacher_outputs, "MAX_CHUNK_TOKENS", 20)  # prompts in several passes
    target = Target(MODELS[name]())
    target.modules.watch((1, 2))
    teacher = Teacher(target, TeacherCache(tmp_path, {}), "train", 8, (1, 2))
    rng = np.random.default_rng(1)
    jobs = [
        GenerationJob(rng.integers(8, 60, length).tolist(), temp)
        for length, temp in ((1, 0.0), (13, 0.8), (4, 0.8), (23, 0.0), (2, 0.8))
    ]
    generator = TextGenerator(target, [STOP, 9, 11], 0)
    options = DataOptions(answer_tokens=40, sequence_length=50)
    texts = generator.answer(teacher, iter(jobs), options, None, lambda count: None)
    assert len({len(text) for text in texts}) > 1
    kept = teacher.cache.load("train", 0, (1, 2))
    read = read_sequences(target, texts, 8, (1, 2))
    is_read = np.ones(kept.tokens.shape[0], np.bool_)
    is_read[np.array(kept.starts)[1:] - 1] = False
    for found, expected in zip(vars(kept).values(), vars(read).values(), strict=True):
        if found.shape[0] == len(is_read):
            where = mx.array(np.flatnonzero(is_read))
            np.testing.assert_allclose(
                np.array(found[where]), np.array(expected[where]), rtol=4e-3, atol=1e-3
            )
        else:
            assert mx.array_equal(found, expected)


def test_shards_of_generated_texts_are_kept_and_get_other_layers(tmp_path: Path) -> None:
    target, cache = Target(tiny_llama()), TeacherCache(tmp_path, {})
    target.modules.watch((0,))
    options = DataOptions(answer_tokens=8)

    def run(layers: Sequence[int]) -> list[list[int]]:
        generator = TextGenerator(target, [STOP], 0)
        generator.round_size = 4
        jobs = (GenerationJob([1, 2 + number], 0.8) for number in range(10))
        teacher = Teacher(target, cache, "train", 8, layers)
        texts = generator.answer(teacher, jobs, options, None, lambda count: None, first=2)
        return [text.tokens.tolist() for text in texts]

    texts = run(())
    assert len(texts) == 10
    assert [number for number in range(9) if cache.has("train", number)] == [2, 3, 4]
    before = cache.path("train", 2).read_bytes()
    cache.path("train", 3).unlink()
    assert run(()) == texts, "as a run that was killed continues"
    assert cache.path("train", 2).read_bytes() == before
    assert run((0,)) == texts
    assert all(cache.load("train", number, (0,)).states is not None for number in (2, 3, 4))


def test_no_more_than_the_asked_tokens_are_written(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    target = Target(tiny_llama())
    generator = TextGenerator(target, [STOP], 0)
    options = DataOptions(answer_tokens=16)
    for total in (1, 100, 1000):
        cache = TeacherCache(tmp_path_factory.mktemp("texts"), {})
        jobs = (GenerationJob([1, 2 + number % 50], 0.8) for number in range(10_000))
        seen: list[int] = []
        teacher = Teacher(target, cache, "train", 4, ())
        texts = generator.answer(teacher, jobs, options, total, seen.append)
        count = sum(int(text.is_trained.sum()) for text in texts)
        assert total <= count < total + 5 * options.answer_tokens
        assert seen[-1] == count

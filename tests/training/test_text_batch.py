"""Texts that the target writes many at once are those that it writes one by one."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import DataOptions, TextGenerator, TokenSequence
from mlx_redrafter.training.self_generated import GenerationJob
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training.text_batch import answer, sample
from tests.helpers.models import tiny_llama
from tests.models.tiny_models import build, windowed_config

STOP = 7


def _windowed() -> nn.Module:
    return build(windowed_config("gemma3_text"))


@pytest.mark.parametrize("make", [tiny_llama, _windowed])
def test_greedy_texts_are_those_of_mlx_lm(make: Callable[[], nn.Module]) -> None:
    model = make()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, length).tolist() for length in (1, 9, 4, 23, 2)]
    most = [30, 4, 30, 12, 1]
    counts: list[int] = []
    found = answer(model, prompts, [0.0] * 5, most, [STOP], counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == sum(map(len, found))
    for prompt, text, longest in zip(prompts, found, most, strict=True):
        assert len(text) == longest or text[-1] == STOP
        steps = generate_step(mx.array(prompt), model, max_tokens=len(text))
        assert text == [int(token) for token, _ in steps]


def test_every_pass_can_be_interrupted() -> None:
    """A report between passes may end the work: prompts, answers, and reading."""
    model, prompts = tiny_llama(), [[1] * 40] * 32
    counts: list[int] = []

    def stop(count: int) -> None:
        counts.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(model, prompts, [0.0] * 32, [8] * 32, [], stop)
    assert counts == [0], "after the first part of the prompts"
    texts = [TokenSequence(np.ones(90, np.int32), np.ones(90, np.bool_)) for _ in range(20)]
    read: list[int] = []
    read_sequences(Target(model), texts, 4, (), read.append)
    assert read == [0, 0, 720, 720, 1440], "of 8 texts at once, 64 tokens of each"


def test_every_text_has_its_own_temperature() -> None:
    logits = mx.log(mx.array([[0.6, 0.3, 0.1]] * 4000))
    mx.random.seed(0)
    found = np.array(to_ints(sample(logits, [0.0, 1.0, 0.5, 1e-4] * 1000))).reshape(-1, 4)
    assert not found[:, [0, 3]].any()
    shares = [np.bincount(column, minlength=3) / 1000 for column in found.T]
    np.testing.assert_allclose(shares[1], [0.6, 0.3, 0.1], atol=0.05)
    np.testing.assert_allclose(shares[2], np.array([36, 9, 1]) / 46, atol=0.05)


def test_no_more_than_the_asked_tokens_are_written(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    generator = TextGenerator(tiny_llama(), [STOP], 0)
    options = DataOptions(answer_tokens=16)
    for total in (1, 100, 1000):
        folder = tmp_path_factory.mktemp("texts")
        jobs = (GenerationJob([1, 2 + number % 50], 0.8) for number in range(10_000))
        seen: list[int] = []
        rounds = list(generator.rounds(jobs, options, total, folder, "text", seen.append))
        count = sum(int(text.is_trained.sum()) for texts in rounds for text in texts)
        assert total <= count < total + 5 * options.answer_tokens
        assert seen[-1] == count

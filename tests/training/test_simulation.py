"""Simulated steps against those that decoding really takes."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter import load_drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.simulated_decoding import simulate
from mlx_redrafter.training.students.state_students import RecurrentStudent
from mlx_redrafter.training.teacher import read_sequences
from tests.conftest import Trained
from tests.helpers.models import random_drafter, tiny_llama
from tests.training.conftest import Run
from tests.training.pieces import drafted_texts

PROMPTS = ("One day, a little", "Tom had a red ball.", "The cat and the dog", "It was night")
LENGTH = 5


def test_simulated_with_noise_equals_decoding_with_a_seed(stories: Trained, finished: Run) -> None:
    """Compare averages, because the simulation draws other noise."""
    temp = 0.8
    drafter = load_drafter(finished.request.out)
    drafter.set_dtype(mx.float32)
    shape = {"beam_width": 1, "beam_length": LENGTH, "max_tokens": 80, "temp": temp}
    calls = [
        (stories.tokenizer.encode(prompt), {**shape, "seed": seed})
        for seed, prompt in itertools.product(range(6), PROMPTS)
    ]
    sequences, tokens, steps = drafted_texts(stories.model, stories.tokenizer, drafter, calls)
    target = Target(stories.model)
    shard = read_sequences(target, sequences, 512)
    found = simulate(RecurrentStudent(drafter, target.modules.embed), [shard], LENGTH, temp)
    without = simulate(RecurrentStudent(drafter, target.modules.embed), [shard], LENGTH)
    assert found.tokens_per_step == pytest.approx(tokens / steps, rel=0.05)
    assert without.tokens_per_step < 0.95 * found.tokens_per_step


def test_texts_with_nothing_to_draft_are_left_out() -> None:
    target = Target(tiny_llama(vocab_size=16))
    short = TokenSequence(np.array([1, 2, 3], np.int32), np.array([False, False, True]))
    shard = read_sequences(target, [short], 4)
    found = simulate(
        RecurrentStudent(random_drafter(16, 32), target.modules.embed), [shard], LENGTH
    )
    assert found.steps == 0
    assert found.tokens_per_step is None

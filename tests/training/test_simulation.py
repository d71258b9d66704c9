"""Simulated steps against those that decoding really takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter import load_drafter, stream_generate
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.simulated_decoding import simulate
from mlx_redrafter.training.students.recurrent_student import RecurrentStudent
from mlx_redrafter.training.teacher import read_sequences
from tests.conftest import Trained
from tests.helpers.models import random_drafter, tiny_llama
from tests.training.conftest import Run

PROMPTS = ("One day, a little", "Tom had a red ball.", "The cat and the dog", "It was night")
LENGTH = 5


def _decode(
    stories: Trained, drafter: Drafter, samplings: Sequence[dict[str, Any]]
) -> tuple[list[TokenSequence], int, int]:
    """Texts after every prompt, sampled in every way; their tokens, and the steps they took."""
    sequences, tokens, steps = [], 0, 0
    for sampling, prompt in itertools.product(samplings, PROMPTS):
        ids = stories.tokenizer.encode(prompt)
        options = {"beam_width": 1, "beam_length": LENGTH, **sampling, "max_tokens": 80}
        responses = list(
            stream_generate(stories.model, stories.tokenizer, ids, drafter=drafter, **options)
        )
        text = np.array([*ids, *(response.token for response in responses)], np.int32)
        sequences.append(TokenSequence(text, np.arange(len(text)) >= len(ids)))
        tokens += len(responses) - 1
        steps += responses[-1].steps
    return sequences, tokens, steps


def test_simulated_equals_measured_within_five_percent(stories: Trained, finished: Run) -> None:
    drafter = load_drafter(finished.request.out)
    drafter.set_dtype(mx.float32)
    # A stock sampler: with noise of their own, drafts would be ranked by it too, which only
    # decoding with a seed can know.
    mx.random.seed(3)
    sampler = make_sampler(temp=0.8)
    sequences, tokens, steps = _decode(stories, drafter, [{"sampler": sampler}])
    target = Target(stories.model)
    shard = read_sequences(target, sequences, 4)
    found = simulate(RecurrentStudent(drafter, target.modules.embed), [shard], LENGTH)
    assert found.num_tokens - 1 == tokens
    assert found.tokens_per_step == pytest.approx(tokens / steps, rel=0.05)
    assert tokens / steps > 1.3  # the drafter has learnt something


def test_simulated_with_noise_equals_decoding_with_a_seed(stories: Trained, finished: Run) -> None:
    """Compare averages, because the simulation draws other noise."""
    temp = 0.8
    drafter = load_drafter(finished.request.out)
    drafter.set_dtype(mx.float32)
    samplings = [{"temp": temp, "seed": seed} for seed in range(6)]
    sequences, tokens, steps = _decode(stories, drafter, samplings)
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

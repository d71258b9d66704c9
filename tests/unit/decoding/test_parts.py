"""Parts of decoding: choice of tokens, acceptance, counts, and the clock."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.decoding import delivery
from mlx_redrafter.decoding.delivery import ShapeStats, StepClock
from mlx_redrafter.decoding.passes import accept
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler, StockSampler, gumbel_noise
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.generation_options import MAX_TEMP, SamplingParams
from mlx_redrafter.trees.tree import NO_TOKEN
from tests.helpers.drafts import make_tree
from tests.helpers.oracles import walk


def test_a_kind_of_step_shows_what_was_found_and_expected():
    plan = DraftPlan(DraftShape(2, 6), 8)
    shown = str(ShapeStats(plan, 0.0061, 4, 10, 0.0052, 12.0))
    assert shown == "2x6:8, 4 steps: 2.50 (3.00) tokens, 6.1 (5.2) ms"
    assert str(ShapeStats(None, 0.004, 0, 0, 0.004, 0.0)).startswith("plain, 0 steps: 0.00 (0.00)")


def test_steps_last_from_outcome_to_outcome_unless_the_caller_was_away(monkeypatch):
    now, clock = [0.0], StepClock()
    monkeypatch.setattr(delivery, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(seconds: float, away: float = 0.0) -> float | None:
        clock.leave_out(away)
        now[0] += seconds
        return clock.lap()

    assert [step(seconds) for seconds in (1.0, 0.5, 2.0)] == [None, 0.5, 2.0]
    assert step(1.0, away=0.05) == 1.0
    assert step(1.0, away=0.5) is None
    assert step(1.0) == 1.0, "forgiven with the next step"


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Tokens, parents and choices of a tree with distinct siblings and padding, and L.

    Many are chains, which are as deep as they may be.
    """
    length, is_chain = draw(st.integers(2, 8)), draw(st.booleans())
    tokens, parents, depths = [draw(st.integers(0, 3))], [0], [0]
    for _ in range(length - 1 if is_chain else draw(st.integers(0, 14))):
        parent = len(tokens) - 1 if is_chain else draw(st.integers(0, len(tokens) - 1))
        taken = {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
        free = sorted(set(range(4)) - taken)
        if free and depths[parent] < length - 1:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    padding = 0 if is_chain else draw(st.integers(0, 3))
    tokens += [NO_TOKEN] * padding
    parents += [0] * padding
    chosen = draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    return tokens, parents, chosen, length


@given(trees())
def test_path_is_the_longest_match(case):
    tokens, parents, chosen, length = case
    path, num_accepted, bonus, *_ = accept(make_tree(tokens, parents, length - 1), mx.array(chosen))
    expected = walk(tokens, parents, chosen)
    assert np.array(num_accepted).tolist() == [len(expected) - 1]
    assert path.shape == (length,)
    assert np.array(path).tolist()[: len(expected)] == expected
    assert np.array(bonus).tolist() == [chosen[expected[-1]]]


LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]  # a toy vocabulary of seven
SAMPLES = 20_000


def _choose(params: SamplingParams, logits: list[float], count: int) -> np.ndarray:
    """Choices at ``count`` positions that all have the same logits."""
    rows = nn.log_softmax(mx.array([logits] * count))
    depths = mx.arange(count, dtype=mx.int32)
    chooser = KeyedSampler(params, len(logits))
    noise = chooser.noise(0, count)
    return np.array(chooser.sample(rows, depths, noise, count))


def _expected(params: SamplingParams) -> np.ndarray:
    """mlx-lm's distribution, written out: filters at temperature 1 in its order, then tempered."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    kept = np.ones(len(p), dtype=bool)
    if 0 < params.top_p < 1:
        above = np.cumsum(p) - p  # LOGITS falls
        kept &= above < params.top_p
    if params.min_p:
        kept &= p >= params.min_p * p.max()
    if params.top_k:
        kept &= np.arange(len(p)) < params.top_k
    tempered = np.where(kept, p ** (1 / params.temp), 0.0)
    return np.asarray(tempered / tempered.sum())


OPTIONS: list[dict[str, Any]] = [
    *({"temp": temp} for temp in (1.0, 0.4, 1.5)),
    {"temp": 1.0, "top_p": 0.8},
    {"temp": 0.7, "top_k": 3},
    {"temp": 1.3, "min_p": 0.2},
    {"temp": 1.2, "top_p": 0.95, "min_p": 0.05, "top_k": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_samples_have_the_tempered_and_filtered_distribution(options):
    params = SamplingParams(seed=99, **options)
    counts = np.bincount(_choose(params, LOGITS, SAMPLES), minlength=len(LOGITS))
    expected = _expected(params) * SAMPLES
    assert not counts[expected == 0].any()
    support = expected > 0
    chi_square = ((counts - expected)[support] ** 2 / expected[support]).sum()
    # The 99.9th percentile of chi-square at 6 degrees of freedom is 22.5.
    assert chi_square < 22.5
    wrong = _expected(SamplingParams(**{**options, "temp": 1.2 * params.temp})) * SAMPLES
    assert ((counts - wrong)[support] ** 2 / wrong[support]).sum() > 22.5, "it would be noticed"


def test_chosen_tokens_of_neighbouring_positions_are_independent():
    chosen = _choose(SamplingParams(temp=1.0, seed=5), LOGITS, SAMPLES)
    joint = np.zeros((len(LOGITS), len(LOGITS)))
    np.add.at(joint, (chosen[:-1], chosen[1:]), 1)
    p = _expected(SamplingParams(temp=1.0))
    expected = np.outer(p, p) * (SAMPLES - 1)
    chi_square = ((joint - expected) ** 2 / expected).sum()
    assert chi_square < 85.4  # the 99.9th percentile at 48 degrees of freedom is 84.0


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 20_000])
@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_noise_is_a_function_of_seed_and_position(vocab_size, seed):
    block = np.array(gumbel_noise(seed, 1000 + mx.arange(16), vocab_size))
    assert block.shape == (16, vocab_size)
    assert np.isfinite(block).all()
    for i in range(16):
        alone = np.array(gumbel_noise(seed, mx.array([1000 + i]), vocab_size))
        assert np.array_equal(alone[0], block[i])
    chooser = KeyedSampler(SamplingParams(temp=1.0, seed=seed), vocab_size)
    for i in (*range(16), 3, 4, 5, 9, 10, 0, 15):  # as roots come, with trees between them or not
        root: Any = chooser.noise(999 + i, 1)
        assert np.array_equal(np.array(root.values), block[i : i + 1])
    # As trees come, after passes of which the host knows how many drafts they accepted, or not.
    for i, further, furthest in ((0, 0, 0), (1, 2, 2), (3, 0, 4), (4, 4, 4), (8, 1, 3), (2, 1, 1)):
        accepted = mx.array([further], dtype=mx.int32) if furthest else None
        tree: Any = chooser.noise(999 + i, 3, accepted, furthest)
        assert np.array_equal(np.array(tree.values), block[i + further : i + further + 3])
        root = chooser.noise(999 + i, 1)
        assert np.array_equal(np.array(root.values), block[i : i + 1])
    shifted = np.array(gumbel_noise(seed, 1003 + mx.arange(5), vocab_size))
    assert np.array_equal(shifted, block[3:8])


def test_noise_is_standard_gumbel():
    rows = np.array(gumbel_noise(3, mx.arange(16), 8192))
    other = np.array(gumbel_noise(2**32 - 1, mx.arange(16), 8192))
    assert len(np.unique(np.concatenate([rows, other]))) > 0.95 * 2 * rows.size
    noise = rows.flatten()
    assert abs(noise.mean() - 0.5772) < 0.015
    assert abs(noise.var() - np.pi**2 / 6) < 0.03


def test_what_is_0_in_float32_leaves_the_best_token():
    for params in (
        SamplingParams(temp=1.0, top_p=1e-46),  # 0 in float32
        SamplingParams(temp=1.0, top_p=1e-39, min_p=5e-324, top_k=3),  # 0 where denormals are
        SamplingParams(temp=5e-324, top_p=5e-324),
        SamplingParams(temp=1e-38),  # scores that overflow
        SamplingParams(top_p=0.1, top_k=1, min_p=0.9),
    ):
        assert set(_choose(params, LOGITS[::-1], 200)) == {6}
        noise = GumbelNoise(params, gumbel_noise(0, mx.arange(200), len(LOGITS)))
        rows = nn.log_softmax(mx.array([LOGITS[::-1]] * 200))
        assert set(to_ints(mx.argmax(noise.rank(rows, mx.arange(200), None, 1.0), axis=-1))) == {6}
    # The highest temperature keeps the filter.
    assert set(_choose(SamplingParams(temp=MAX_TEMP, top_k=3), LOGITS, 500)) == {0, 1, 2}


def test_stock_sampler_walks_the_states_of_plain_sampling():
    """At depth d every node samples from the state that d earlier samples leave behind."""
    sampler = make_sampler(temp=1.0)
    rows = nn.log_softmax(mx.random.normal((5, 40), key=mx.random.key(0)))
    depths = mx.array([0, 1, 1, 2, 2], dtype=mx.int32)

    for num_choices, path in ((1, [0]), (2, [0, 2]), (3, [0, 1, 4])):
        mx.random.seed(8)
        expected: list[Any] = [sampler(rows[node : node + 1]).tolist() for node in path]
        state_after = random_state()

        mx.random.seed(8)
        chooser = StockSampler(sampler)
        chosen: Any = chooser.sample(rows, depths, None, 4).tolist()
        chooser.commit(num_choices)
        assert [[chosen[node]] for node in path] == expected
        assert random_state() == state_after


def test_texts_in_turns_draw_from_states_of_their_own():
    sampler = make_sampler(temp=1.0)
    rows = nn.log_softmax(mx.random.normal((3, 40), key=mx.random.key(0)))
    mx.random.seed(8)
    expected: list[Any] = [sampler(rows[:1]).item() for _ in range(4)]
    mx.random.seed(8)
    first, second = StockSampler(sampler), StockSampler(sampler)
    assert first.sample(rows[:1], None, None, 3).tolist() == expected[:1]
    assert second.sample(rows[:1], None, None, 1).tolist() == expected[3:]
    state = random_state()
    first.commit(2)
    first.go_back(1)
    assert random_state() == state


def random_state() -> list[int]:
    key: Any = mx.random.state
    return list(key[0].tolist())

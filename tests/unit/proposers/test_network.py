"""The recurrent drafter: its search in numpy, its table of inputs, calibration, and 8 bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.fit import SCALES, ReadSequence
from mlx_redrafter.proposers.quantization import quantization_of, quantize_drafter
from mlx_redrafter.proposers.redrafter import network, precision
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.precision import PAIRS, Pair, quantised_copy
from mlx_redrafter.proposers.search import Expansion, build_tree, merge_beams
from mlx_redrafter.target.target import Target
from tests.helpers import oracles
from tests.helpers.models import expand, random_drafter, tiny_llama
from tests.helpers.oracles import NumpyDrafter, paths_of, tree_paths

VOCAB_SIZE, HIDDEN_SIZE = 67, 32
# Sizes where equations in numpy are slow.
FEW, NARROW = 30, 8


def test_draft_top_k_masks_as_apples_warp_logits():
    drafter = random_drafter(VOCAB_SIZE, NARROW, draft_top_k=3)
    state, hidden = mx.ones((2, NARROW)), mx.ones((NARROW,))
    logits = np.array(drafter.logits(hidden, state), dtype=np.float64)
    found = np.array(drafter.log_probs(hidden, state))
    for row, log_probs in zip(logits, found, strict=True):
        kept = np.argsort(-row)[:3]
        warped = np.full(VOCAB_SIZE, network.MASKED_LOGIT)
        warped[kept] = row[kept] - row.max()
        expected = warped - np.log(np.exp(warped).sum())
        np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("exit_dim", [128, 32])
@pytest.mark.parametrize("bits", [None, 3, 4, 8])
def test_constant_half_of_the_first_layer_changes_no_logits(layers, exit_dim, bits):
    sizes: Any = {"num_draft_layers": layers, "exit_dim": exit_dim}
    drafter = random_drafter(VOCAB_SIZE, 64, **sizes)
    if bits is not None:
        quantize_drafter(drafter, bits, 32)
    hidden, state = mx.random.normal((64,)), mx.random.normal((3, 64))
    for _ in range(2):  # the second time with new weights
        share, expected = drafter.hidden_term(hidden), drafter.logits(hidden, state)
        assert mx.allclose(drafter.logits(hidden, state, share), expected, rtol=1e-4, atol=1e-4)
        if bits is None:
            drafter.update(random_drafter(VOCAB_SIZE, 64, seed=2, **sizes).parameters())
    if bits is not None:  # groups are not cut
        odd = random_drafter(VOCAB_SIZE, 48, exit_dim=32)
        quantize_drafter(odd, bits, 32)
        assert odd.hidden_term(mx.zeros((48,))) is None


IDS = mx.array([3, 66, 0, 3])


def _check(drafter: Drafter, target: Target) -> None:
    expected = np.array(drafter.project_input(target.modules.embed(IDS)).astype(mx.float32))
    found = network.input_lookup(drafter, target)(IDS)
    assert found.dtype == drafter.dtype
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_table_says_what_the_drafter_computes_though_weights_change_in_place(
    drafter, target, dtype
):
    model: Any = target.model
    drafter.set_dtype(dtype)
    is_table = lambda _, layer: isinstance(layer, nn.Embedding)  # noqa: E731
    changes: list[Callable[[], Any]] = [
        lambda: model.update(tree_map(lambda weight: 2 * weight, model.parameters())),
        lambda: model.set_dtype(dtype),
        lambda: model.model.embed_tokens.weight.__setitem__(3, 0.5),
        lambda: model.model.embed_tokens.weight.__imul__(-1),
        lambda: drafter.rnn_w.weight.__setitem__(0, 0.25),
        lambda: drafter.set_dtype(mx.float32),
        lambda: nn.quantize(model, 32, 4, class_predicate=is_table),
        lambda: quantize_drafter(drafter, 8, 32),
    ]
    weights = list(named_parameters(drafter))
    _check(drafter, target)
    assert drafter._input_table is not None
    assert list(named_parameters(drafter)) == weights, "the table is none"
    for number, change in enumerate(changes):
        before = drafter._input_table
        change()
        target = Target(model)
        _check(drafter, target)
        if not (number in (1, 5) and dtype == mx.float32):  # the dtype that it has
            assert drafter._input_table is not before
        before = drafter._input_table
        network.input_lookup(drafter, target)
        assert drafter._input_table is before


def test_there_is_none_where_it_would_be_large_or_saves_nothing(monkeypatch, drafter, target):
    monkeypatch.setattr(network, "MAX_BYTES", 4 * VOCAB_SIZE * HIDDEN_SIZE - 1)
    _check(drafter, target)
    assert drafter._input_table is None
    drafter.set_dtype(mx.float16)
    _check(drafter, target)
    assert drafter._input_table is not None
    plain = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, rnn=False)
    _check(plain, target)
    assert plain._input_table is None


def _embed(tokens: mx.array) -> mx.array:
    return mx.random.normal((FEW, NARROW), key=mx.random.key(5))[tokens]


def _text(drafter: Drafter, length: int, sharpness: float, seed: int = 0) -> ReadSequence:
    """A text whose target samples the drafter's own first drafts, sharpened.

    ``top_ids`` are in no order but the first, which is drawn: a greedy target that nobody can
    predict better.
    """
    keys = mx.random.split(mx.random.key(seed), 3)
    tokens = mx.random.randint(0, FEW, (length,), key=keys[0])
    hidden_states = mx.random.normal((length, NARROW), key=keys[1])
    nothing = mx.zeros((length, 1), dtype=mx.int32)
    text = ReadSequence(mx.pad(tokens, (1, 0)), 1, hidden_states, nothing, nothing)
    logits = sharpness * network.predict(drafter, _embed, text)[0].logits
    first = mx.random.categorical(logits, key=keys[2])[:, None]
    rows = mx.broadcast_to(mx.arange(logits.shape[1]), logits.shape)
    rows = mx.where(rows == first, rows[:, :1], mx.where(rows == 0, first, rows))
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = mx.take_along_axis(log_probs, rows, axis=-1)
    ids = drafter.to_token_ids(rows)
    top_ids, top_log_probs = (mx.concatenate([one[:1], one]) for one in (ids, log_probs))
    return text._replace(top_ids=top_ids, top_log_probs=top_log_probs)


def _nats(drafter: Drafter, text: ReadSequence, scale: float) -> float:
    total = 0.0
    for prediction in network.predict(drafter, _embed, text):
        rows = np.array(prediction.logits, dtype=np.float64) * scale
        ids = np.array(drafter.to_token_ids(mx.arange(rows.shape[1]))).tolist()
        for row, token in zip(rows, np.array(prediction.chosen).tolist(), strict=True):
            if token in ids:
                total += np.log(np.exp(row).sum()) - row[ids.index(token)]
    return total


@pytest.mark.parametrize("draft_vocab", [None, 12])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_fitted_scale_is_the_most_likely_one(sharpness, draft_vocab):
    drafter = random_drafter(FEW, NARROW, draft_vocab_size=draft_vocab)
    # Longer than a batch, whose seams leave out a few predictions.
    text = _text(drafter, 100, sharpness)
    found = network.calibrate(drafter, _embed, [text])
    assert found.inverse_temperature == min(SCALES, key=lambda scale: _nats(drafter, text, scale))


def test_a_drafter_that_knows_the_distribution_gets_all_of_the_noise():
    drafter = random_drafter(FEW, NARROW)
    for flatness in (1, 3):  # one that is too flat gets less
        drafter.lm_head[-1].weight = flatness * drafter.lm_head[-1].weight
        texts = [_text(drafter, 200, 1.0, seed) for seed in range(3)]
        drafter.lm_head[-1].weight = drafter.lm_head[-1].weight / flatness
        weight = network.calibrate(drafter, _embed, texts).coupling_weight
        assert weight >= 0.9 if flatness == 1 else weight < 0.7
    nothing, states = mx.zeros((2, 1), dtype=mx.int32), mx.zeros((2, NARROW))
    short = ReadSequence(mx.zeros((3,), dtype=mx.int32), 1, states, nothing, nothing)
    other = random_drafter(FEW, NARROW, inverse_temperature=3.0)
    assert network.calibrate(other, _embed, [short]) == drafter.config, "nothing is fitted"


def test_scale_ranks_drafts_of_greedy_targets_only():
    scaled = random_drafter(FEW, NARROW, inverse_temperature=3.0)
    plain = random_drafter(FEW, NARROW)
    hidden, root = mx.random.normal((NARROW,), key=mx.random.key(1)), mx.array([4])
    shape = DraftShape(2, 3)
    found = expand(scaled, _embed, hidden, root, shape)
    state = plain.start(plain.project_input(_embed(root)))
    expected = 3 * plain.logits(hidden, state)
    expected = expected - mx.logsumexp(expected)
    best = mx.sort(expected.flatten())[::-1][:2]
    np.testing.assert_allclose(np.array(found.scores[:2]), np.array(best), rtol=1e-4)
    same = lambda scores, depth: scores  # noqa: E731
    noisy = [expand(one, _embed, hidden, root, shape, same) for one in (scaled, plain)]
    np.testing.assert_array_equal(np.array(noisy[0].scores), np.array(noisy[1].scores))


FASTER, SLOWER = [2.0] * PAIRS, [0.7] * PAIRS
# Most pairs seem faster, some do not.
MIXED = [0.7, 0.7, 0.8, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "MIN_BYTES", 0)


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter(VOCAB_SIZE, HIDDEN_SIZE)


@pytest.fixture
def target() -> Target:
    return Target(tiny_llama(vocab_size=VOCAB_SIZE))


def _timer(*moments: list[float]) -> Callable[..., list[Pair]]:
    """A timer that finds these ratios, one list per run, and fails in further runs."""
    left: Iterator[list[float]] = iter(moments)
    return lambda *_: [{"given": ratio, "quantised": 1.0} for ratio in next(left)]


def _choose(drafter: Drafter, target: Target, timer: Callable[..., list[Pair]]) -> Drafter:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "time_pairs", timer)
        return precision.choose_precision(drafter, target)


def test_a_copy_in_8_bits_says_nearly_the_same_and_leaves_the_drafter_alone(drafter):
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    copy = quantised_copy(drafter)
    assert _bits_of(copy) == 8
    assert _bits_of(drafter) is None
    after = copy.log_probs(hidden, state[None])
    assert mx.abs(after - before).max().item() < 0.2
    assert not mx.array_equal(after, before)
    assert mx.array_equal(drafter.log_probs(hidden, state[None]), before)


# Ratios in one or two runs, and how many bits are used in the first run and in later ones.
RUNS: list[tuple[list[list[float]], int | None, int | None]] = [
    ([FASTER, FASTER], 8, 8),
    ([SLOWER], None, None),
    ([[1.0 + 0.9 * (precision.GAIN - 1)] * PAIRS], None, None),
    ([MIXED, FASTER], None, 8),
    ([MIXED, SLOWER], None, None),
    ([MIXED, MIXED], None, None),
    # A loaded moment in which 8 bits seem faster counts for that run alone.
    ([FASTER, SLOWER], 8, None),
]


@pytest.mark.parametrize(("moments", "first", "later"), RUNS)
def test_8_bits_are_used_if_they_are_faster_in_both_of_two_runs(
    drafter, target, moments, first, later
):
    timer = _timer(*moments)
    for expected in (first, later, later):
        found = _choose(drafter, target, timer)
        assert _bits_of(found) == expected
        assert (found is drafter) == (expected is None)


def test_both_are_timed(drafter, target):
    pairs = precision.time_pairs(drafter, quantised_copy(drafter), target)
    assert precision.MIN_PAIRS <= len(pairs) <= PAIRS
    assert all(min(pair["given"], pair["quantised"]) > 0 for pair in pairs)


def test_a_drafter_that_is_narrow_or_small_stays_as_it_is(monkeypatch, drafter, target):
    narrow = random_drafter(VOCAB_SIZE, 24)
    assert _choose(narrow, target, _timer()) is narrow
    monkeypatch.setattr(precision, "MIN_BYTES", 2**23)
    assert _choose(drafter, target, _timer()) is drafter


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only CPUs unpack")
def test_a_quantised_drafter_is_unpacked_on_a_cpu(drafter, target):
    quantize_drafter(drafter, 4, 32)
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    found = _choose(drafter, target, _timer())
    assert _bits_of(found) is None
    assert found.dtype == mx.float32
    assert mx.allclose(found.log_probs(hidden, state[None]), before, atol=1e-4)


def _bits_of(drafter: Drafter) -> int | None:
    return (quantization_of(drafter) or {}).get("bits")


ROOT_TOKEN = 11
ROOT = mx.array([ROOT_TOKEN])
WIDTHS_AND_LENGTHS = [(1, 2), (1, 16), (2, 3), (3, 5), (4, 5), (7, 4), (16, 6), (64, 2), (64, 3)]


def _context(vocab_size: int) -> tuple[mx.array, mx.array]:
    """An input embedding, shape (V, H), and a hidden state, shape (H,)."""
    keys = mx.random.split(mx.random.key(0), 2)
    embedding = mx.random.normal((vocab_size, HIDDEN_SIZE), key=keys[0])
    return embedding, mx.random.normal((HIDDEN_SIZE,), key=keys[1])


def _expand(drafter: Drafter, shape: DraftShape) -> Expansion:
    embedding, hidden = _context(drafter.config.vocab_size)
    return expand(drafter, lambda ids: embedding[ids], hidden, ROOT, shape)


def _literal(drafter: Drafter, width: int, length: int) -> oracles.Search:
    exact = (np.array(one, dtype=np.float64) for one in _context(drafter.config.vocab_size))
    return oracles.beam_search(NumpyDrafter(drafter), *exact, ROOT_TOKEN, width, length)


@pytest.mark.parametrize(("width", "length"), [*WIDTHS_AND_LENGTHS, (3, 4)])
@pytest.mark.parametrize("rnn", [True, False])
def test_nodes_and_trees_are_those_of_a_literal_search(width, length, rnn):
    """All scored nodes, trees of the best of them, and the merged beams."""
    vocab_size = 20_257 if (width, length) == (3, 4) else VOCAB_SIZE
    sizes: Any = {"num_draft_layers": width % 4, "exit_dim": (1 + length % 3) * HIDDEN_SIZE}
    drafter = random_drafter(vocab_size, HIDDEN_SIZE, rnn=rnn, **sizes)
    assert ("input_proj" in drafter) == (length % 3 != 1)
    literal, expansion = (
        _literal(drafter, width, length),
        _expand(drafter, DraftShape(width, length)),
    )
    parents = [0, *(parent + 1 for parent in to_ints(expansion.parents))]
    paths = paths_of([ROOT_TOKEN, *to_ints(expansion.tokens)], parents)[1:]
    found = dict(zip(paths, to_floats(expansion.scores), strict=True))
    per_level = 1 if width == 1 else min(4 * width, VOCAB_SIZE)
    assert len(found) == per_level * (length - 1)
    # Scores reach -88, which processors without AVX-512 round by up to 8e-6 of that.
    assert found == pytest.approx(literal.scores, rel=1e-5, abs=1e-4)
    best = sorted(literal.scores, key=lambda path: -literal.scores[path])
    for nodes in {2, min(9, 1 + len(best)), 1 + len(best)}:
        tree = build_tree(expansion, ROOT, DraftPlan.of(width, length, nodes))
        assert set(tree_paths(tree)) == {(ROOT_TOKEN,), *best[: nodes - 1]}
        assert tree.num_nodes == tree.tokens.shape[0] == nodes
    shape = DraftShape(width, length, "beam")
    tokens, parents = oracles.dedup_and_pack(np.array(literal.beams))
    tree = merge_beams(_expand(drafter, shape), ROOT, shape)
    assert set(tree_paths(tree)) == set(paths_of(tokens, parents))
    assert tree.num_nodes == len(tokens)
    assert tree.num_nodes <= tree.tokens.shape[0] <= shape.max_nodes


@pytest.mark.parametrize("select", ["top_n", "beam"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["everywhere", "half", "one"])
def test_drafts_that_are_no_numbers_still_make_a_tree(select, value, where):
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, num_draft_layers=0)
    head: Any = drafter.lm_head[0]
    rows = {"everywhere": VOCAB_SIZE, "half": VOCAB_SIZE // 2, "one": 1}[where]
    head.weight[:rows] = value
    plan = DraftPlan.of(4, 4, select=select)
    expansion = _expand(drafter, plan.shape)
    scores = np.array(expansion.scores)
    assert np.isfinite(scores).all()
    parents = np.array(expansion.parents)
    assert (scores[parents >= 0] <= scores[parents[parents >= 0]]).all()
    paths = tree_paths(build_tree(expansion, ROOT, plan))
    assert all(0 <= token < VOCAB_SIZE for path in paths for token in path)


def test_head_over_part_of_the_vocabulary_proposes_its_token_ids():
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=6)
    allowed = [60, 2, 33, 41, 7, 19]
    drafter.token_ids = mx.array(allowed, dtype=mx.int32)
    plan = DraftPlan.of(3, 4, 12)
    tree = build_tree(_expand(drafter, plan.shape), ROOT, plan)
    drafts = {token for path in tree_paths(tree) for token in path[1:]}
    assert set() < drafts <= set(allowed)

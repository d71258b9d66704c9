"""Block drafters: what their authors' packages compute, scores of linked levels, and refusals."""

import json
import random
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers import block
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.linked_levels import LinkedLevels
from mlx_redrafter.proposers.search import build_trees, search_all
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import Drafts
from tests.golden import block_layouts
from tests.golden.block_layouts import LAYOUTS, NUM_TARGET_LAYERS, ROOT, states, tensors
from tests.golden.record_block import FILE
from tests.helpers import mtp
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.flights import flight_of
from tests.helpers.models import layer_inputs, tiny_llama, wrapped_tokenizer
from tests.helpers.oracles import node_paths, paths_of
from tests.models.tiny_models import build, tiny_config

VOCAB, GATED = 48, "speculators DSpark gated"
# Keys about the drafter itself, and not about its target.
STATED = (
    "conv_kernel_size dspark_bonus_anchor is_causal markov_rank rope_is_neox_style "
    "sample_from_anchor selector_rank"
).split()


# Changes of a layout by key of the config or name of a tensor: a value, what becomes of the tensor,
# or None for no tensors with this part of a name.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("z-lab", {"dflash_config.mask_token_id": VOCAB}, "from 0 to 47, got 48"),
    ("DeepSpec", {"target_layer_ids": [0, 1, 2]}, "2 layers of .* config.json names 3"),
    ("DeepSpec", {"target_layer_ids": [0, 9]}, "captured_layers must be .* got 10"),
    ("z-lab", {"dflash_config": {}}, "expected target_layer_ids, a list"),
    ("SpecForge", {"markov_head": None}, "says markov_rank 8, .* those of 0"),
    ("incoai", {"candidate_selector": None}, "says selector_rank 8, .* those of 0"),
    (GATED, {"markov_head.gate_proj": None}, "says markov_head_type 'gated', .* of 'vanilla'"),
    ("z-lab", {"rope_parameters": {"rope_dim": 3}}, "rope_dims must be even, got 3"),
    (GATED, {"d2t": lambda offsets: offsets + 2**32}, "must be ids from 0 to 47"),
    (GATED, {"d2t": lambda _: -mx.arange(20)}, "must be distinct ids"),
    ("z-lab", {"d2t": lambda _: mx.arange(20)}, "lm_head.weight is missing, expected sh"),
    ("DeepSpec", {"markov_w2": None}, r"markov_head.markov_w2.weight is missing"),
    ("z-lab", {"layers.1.mlp": None}, r"layers.1.mlp.down_proj.weight is missing"),
    ("z-lab", {"num_hidden_layers": 3}, r"layers.2.input_layernorm.weight is missing"),
    ("SpecForge", {"dflash_config.projector_type": "xpress"}, "is not supported"),
    ("DeepSpec", {"log_snr_conditioning": True}, "log_snr_conditioning"),
    ("z-lab", {"layers.0.self_attn.qkv_proj.weight": lambda _: mx.zeros(4)}, "a joint proj"),
    ("z-lab", {"fc.weight": lambda _: mx.zeros(4)}, r"fc.weight, found \[4\]; download it"),
    ("z-lab", {"hidden_act": "gelu"}, "hidden_act 'gelu', not 'silu'"),
    ("z-lab", {"layer_types": ["linear"] * 2}, "one of .* for each of 2 layers"),
    ("z-lab", {"hidden_norm.weight": lambda norm: norm - 1}, "norms that are stored as factors"),
    ("Qwen3.5", {"hidden_norm.weight": lambda norm: norm + 1}, "norms that are stored less one"),
    ("DeepSpec", {"dspark_block_size": 5}, "expected a drafter, found a"),
    ("z-lab", {"rope_parameters": {"rope_type": "dynamic"}}, "must be one of"),
    ("speculators DSpark rnn", {"sample_from_anchor": False}, "needs first_slot 0"),
]


def write(folder: Path, name: str, /, **changes: Any) -> Path:
    config = json.loads(json.dumps(LAYOUTS[name].config))
    arrays: dict[str, Any] = {key: mx.array(one) for key, one in tensors(LAYOUTS[name]).items()}
    for key, change in changes.items():
        if change is None:
            arrays = {name: one for name, one in arrays.items() if key not in name}
        elif callable(change):
            arrays[key] = change(arrays.get(key))
        else:
            *path, last = key.split(".")
            reduce(getitem, path, config)[last] = change
    return mtp.write(folder, arrays, config)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2])
def test_bad_files_are_refused_in_one_line(case, tmp_path):
    name, changes, message = case
    folder = write(tmp_path, name, **changes)
    assert recognise(folder)[0] is block
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_block(folder)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_config_contradicts_its_tensors(name, tmp_path):
    """Other numbers than the tensors have, and flags in words, are refused by their keys."""
    config = LAYOUTS[name].config
    load_block(write(tmp_path, name))
    nested = {f"{key}.": one for key, one in config.items() if isinstance(one, dict)}
    for start, place in {"": config, **nested}.items():
        for key in place.keys() & STATED:
            changed = str(place[key]) if isinstance(place[key], bool) else place[key] + 1
            write(tmp_path, name, **{start + key: changed})
            with pytest.raises(CheckpointError, match=key):
                load_block(tmp_path)
    write(tmp_path, name)
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"for masks \(mask_embedding.pt\), which is not"):
        load_block(tmp_path)


def test_drafters_for_other_targets_are_refused():
    tokenizer = wrapped_tokenizer(VOCAB)
    target = Target(tiny_llama(vocab_size=VOCAB, layers=NUM_TARGET_LAYERS))
    other = random_block(block_config(VOCAB, 32, num_target_layers=9))
    with pytest.raises(CheckpointError, match=r"expected a model of 9 layers, .* found one of 4"):
        other.check_fit(target, tokenizer)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "cohere2", "granite", "muse_glimmer"])
def test_the_head_and_the_embedding_of_the_target(name):
    """Logits without scale and limit, and inputs of the first layer with the embedding's scale."""
    target = Target(build(tiny_config(name)))
    target.modules.watch([0])
    ids = mx.array([3, 8, 5])
    inputs = target.modules.embed_input(ids)
    assert mx.allclose(inputs, layer_inputs(target, ids, [0]), rtol=1e-4).item()
    states = mx.random.normal((2, target.hidden_size), key=mx.random.key(1))
    raw, logits = target.modules.project(states), target.modules.logits(states)
    assert mx.array_equal(mx.argsort(raw), mx.argsort(logits)).item()
    cap = getattr(target.model, "final_logit_softcapping", None)
    if cap is not None:
        assert mx.allclose(cap * mx.tanh(raw / cap), logits, atol=1e-4).item()


def new_levels(network: BlockNetwork, count: int | None, rank: Any = None) -> LinkedLevels:
    mx.random.seed(5)
    levels = network.config.num_drafts
    outputs = mx.random.normal((levels, network.config.hidden_size))
    unary = 3 * mx.random.normal((levels, network.config.head_rows))
    scales, ids = mx.linspace(1.0, 2.0, levels), network.to_token_ids
    start = outputs[None], unary[None], mx.array([7])
    return LinkedLevels(network.link, *start, scales, rank, count, ids)


@pytest.mark.parametrize("link", ["vanilla", "gated", "recurrent", "DFlash 2"])
def test_a_search_scores_every_path_by_the_one_formula(link):
    """Follow each node from the root by itself, and add up the formula's log-probabilities."""
    network = random_block(block_config(VOCAB, 32, **LINKS[link]), seed=3)
    shape = DraftShape(3, 1 + network.config.num_drafts)
    for count in (None, 12):
        found = search_all(new_levels(network, count), shape).alone
        again = new_levels(network, None)
        tokens, parents = to_ints(found.tokens), to_ints(found.parents)
        # Without the root, of which the search has no node.
        paths = node_paths([0, *(parent + 1 for parent in parents)])[1:]
        for path in paths[::5]:
            total, state, previous = 0.0, None, mx.array([7])
            for depth, step in enumerate(node - 1 for node in path[1:]):
                row = slice(depth, depth + 1)
                feature, state = network.link.feature(previous, again.outputs[0, row], state)
                scale, unary = again.scales[row], again.unary[0, row]
                linked = network.link.scores(feature, None)
                if count is not None:  # others than the candidates have no link
                    least = mx.min(mx.topk(unary, count))
                    linked = mx.where(unary >= least, linked, 0)
                scores = scale * (unary + linked)
                total += (scores[0, tokens[step]] - mx.logsumexp(scores)).item()
                previous = mx.array([tokens[step]])
            assert found.scores[path[-1] - 1].item() == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("link", [None, *LINKS])
@pytest.mark.parametrize("count", [None, 12])
def test_a_chain_is_the_search_of_one_beam(link, count):
    config = {} if link is None else LINKS[link]
    network = random_block(block_config(VOCAB, 32, **config), seed=3)
    shape = DraftShape(1, 1 + network.config.num_drafts)
    found = new_levels(network, count).chain().alone
    expected = search_all(new_levels(network, count), shape).alone
    assert mx.array_equal(found.tokens, expected.tokens).item()
    assert mx.array_equal(found.parents, expected.parents).item()
    assert mx.allclose(found.scores, expected.scores, atol=1e-4).item()


def test_trees_of_scores_that_are_not_calibrated_are_not_worse_than_chains():
    """Of a head whose logits are three times too flat for its target's greedy choices."""
    network = random_block(block_config(VOCAB, 32))
    depths, roots = 4, mx.zeros((300,), dtype=mx.int32)
    logits = 2 * mx.random.normal((300, depths, VOCAB), key=mx.random.key(1))
    texts = mx.random.categorical(3 * logits, key=mx.random.key(2)).tolist()

    def accepted(scales: mx.array | None, plan: DraftPlan) -> int:
        outputs, to_ids = mx.zeros((300, depths, 32)), network.to_token_ids
        levels = LinkedLevels(None, outputs, logits, roots, scales, None, None, to_ids)
        trees = build_trees(search_all(levels, plan.shape), mx.split(roots, 300), plan)
        pairs = zip(trees, texts, strict=True)
        return sum(_count_accepted(tree.read(), text) for tree, text in pairs)

    chain, tree = DraftPlan.of(1, 5, 5), DraftPlan.of(4, 5, 8)
    assert accepted(None, tree) < accepted(None, chain) < accepted(network.scales(4, None), tree)


def _count_accepted(drafts: Drafts, text: list[int]) -> int:
    paths = paths_of([0, *drafts.tokens], [0, *drafts.parents])
    return max(len(path) - 1 for path in paths if [*path[1:]] == text[: len(path) - 1])


def test_candidates_are_those_that_the_noise_may_choose():
    """Favour an improbable token by the noise: it is a candidate, and wins."""
    network = random_block(block_config(VOCAB, 32, **LINKS["vanilla"]))
    plain = new_levels(network, None)
    favoured = to_ints(mx.argmin(plain.unary[0], axis=-1))

    def rank(scores: mx.array, depth: Any, token_ids: mx.array | None = None) -> mx.array:
        ids = mx.arange(VOCAB) if token_ids is None else token_ids
        depths = [depth] if isinstance(depth, int) else to_ints(depth)
        noise = [200.0 * (ids == favoured[one]) for one in depths]
        return scores + mx.stack(noise)

    found = search_all(new_levels(network, 4, rank), DraftShape(1, 5)).alone
    assert to_ints(found.tokens) == favoured[:4]


def test_a_confident_head_keeps_the_order_and_sets_the_best():
    confidence = {"has_confidence": True, "confidence_reads_token": True}
    network = random_block(block_config(VOCAB, 32, **confidence, **LINKS["vanilla"]), seed=1)
    plain, trusted = new_levels(network, None), new_levels(network, None)
    trusted.confidences = network.confidences
    before, after = plain.first()[0], trusted.first()[0]
    estimate = network.confidences(plain.outputs[0, :1], mx.array([7]))[0, 0]
    assert mx.max(after).item() == pytest.approx(estimate.item(), abs=1e-5)
    assert mx.array_equal(mx.argsort(before), mx.argsort(after)).item()


TOLERANCE = 1e-4
JUNK = 50.0


@pytest.fixture(scope="module")
def target() -> Target:
    """Make a model with the embedding and the head that the references had."""
    model: Any = tiny_llama(vocab_size=VOCAB, layers=NUM_TARGET_LAYERS)
    embedding, head = map(mx.array, block_layouts.target_tables())
    model.model.embed_tokens.weight, model.lm_head.weight = embedding, head
    return Target(model)


@pytest.fixture(scope="module")
def stored() -> dict[str, mx.array]:
    with np.load(FILE) as found:
        return {key: mx.array(found[key]) for key in found}


def history(drafting: Any, length: int, rng: random.Random) -> Iterator[Pass]:
    """Bring a sequence to so many verified tokens in different steps; yield the last pass.

    Passes without drafts, accepted paths, and rejected drafts with states that no block may see.
    """
    verified = mx.array(states(length))
    prompt = max(1, length // 2)
    for start in range(0, prompt - 1, 4):
        drafting.read(verified[start : min(start + 4, prompt - 1)])
    done = prompt - 1
    while done < length:
        num_tokens = rng.randrange(1, min(4, length - done) + 1)
        num_rejected = rng.randrange(3) if num_tokens > 1 or rng.random() < 0.5 else 0
        path = [ROOT] * (num_tokens + num_rejected)
        junk = JUNK * mx.ones((num_rejected, verified.shape[1]))
        nodes = mx.concatenate([verified[done : done + num_tokens], junk])
        flight = flight_of(path, num_tokens - 1, ROOT, done, nodes)
        done += num_tokens
        if done == length:
            yield flight
        elif rng.random() < 0.4:
            drafting.skip(flight)
        else:
            drafting.propose(flight, DraftPlan.of(2, 4, 6), None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_references(tmp_path, name, target, stored):
    folder = write(tmp_path, name)
    assert recognise(folder)[0].NAME == "block drafter"
    network = load_block(folder)
    network.check_fit(target, wrapped_tokenizer(VOCAB))
    for length in block_layouts.LENGTHS:
        start = f"{name}/{length}/"
        expected = {k.removeprefix(start): v for k, v in stored.items() if k.startswith(start)}
        drafting = network.open(target, [ROOT] * max(1, length // 2), True, [])
        (flight,) = history(drafting, length, random.Random(f"{name} {length}"))
        drafting.propose(flight, DraftPlan.of(1, 2, 2), None)
        drafting._flight = None
        # The block is read once more, over the entries of the block before.
        outputs = network.read_blocks([(drafting, flight)], network.config.num_drafts)[0]
        found = network.logits(outputs, target)
        assert_equal(found, expected["unary"], name)
        assert_linked(network, outputs, found, expected, name)


def assert_equal(found: mx.array, expected: mx.array, name: str) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=TOLERANCE, err_msg=name)


def assert_linked(
    network: BlockNetwork, outputs: mx.array, unary: mx.array, expected: Any, name: str
) -> None:
    """Compare every link's children along the chain, and the confidences there."""
    link, state = network.link, None
    if link is None:
        assert set(expected) == {"unary"}
        return
    previous, is_path = mx.array([ROOT]), expected["linked"].ndim == 1
    count = network.config.num_candidates
    for depth in range(outputs.shape[0]):
        row = slice(depth, depth + 1)
        feature, state = link.feature(previous, outputs[row], state)
        scores = link.scores(feature, None)[0]
        if count is not None:
            rows = mx.argsort(-unary[depth])[:count]
            assert_equal(link.scores(feature, rows[None])[0], scores[rows], name)
            scores = mx.where(mx.any(mx.arange(VOCAB) == rows[:, None], axis=0), scores, 0)
        linked = unary[depth] + scores
        if is_path:  # the reference's own greedy choice among its candidates
            linked = mx.where(scores != 0, linked, -mx.inf)
            previous = mx.argmax(linked, keepdims=True)
            assert previous.item() == expected["linked"][depth].item()
            continue
        assert_equal(linked, expected["linked"][depth], name)
        if "confidence" in expected:
            found = network.confidences(outputs[row], previous)[0, 0]
            assert_equal(mx.exp(found), mx.sigmoid(expected["confidence"][depth]), name)
        previous = mx.array([block_layouts.CHAIN[depth]])

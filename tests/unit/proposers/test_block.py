"""Block drafters: what is refused, what reads the target, and the scores of linked levels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError
from mlx_redrafter.proposers import block
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.linked_levels import LinkedLevels
from mlx_redrafter.proposers.search import build_trees, search_all
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import Drafts
from tests.golden.block_layouts import LAYOUTS, NUM_TARGET_LAYERS, tensors
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.models import layer_inputs, tiny_llama, wrapped_tokenizer
from tests.models.tiny_models import build, tiny_config

Change = Callable[[dict[str, Any], dict[str, Any]], None]
VOCAB = 48
# Keys about the drafter itself, and not about its target.
STATED = {
    "conv_kernel_size",
    "dspark_bonus_anchor",
    "is_causal",
    "markov_rank",
    "rope_is_neox_style",
    "sample_from_anchor",
    "selector_rank",
}


def set_value(*path: str, to: Any) -> Change:
    def change(config: dict[str, Any], arrays: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = to

    return change


def drop(part: str) -> Change:
    def change(config: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if part in name]:
            del arrays[name]

    return change


def put(name: str, make: Callable[[dict[str, Any]], mx.array]) -> Change:
    def change(config: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[name] = make(arrays)

    return change


BAD: dict[str, tuple[str, Change, str]] = {
    "mask token": (
        "z-lab",
        set_value("dflash_config", "mask_token_id", to=VOCAB),
        "mask_token_id must be an integer from 0 to 47, got 48",
    ),
    "number of layers": (
        "DeepSpec",
        set_value("target_layer_ids", to=[0, 1, 2]),
        "reads 2 layers of the target, but target_layer_ids in config.json names 3",
    ),
    "layers beyond the target": (
        "DeepSpec",
        set_value("target_layer_ids", to=[0, 9]),
        "each of captured_layers must be an integer from 0 to 4, got 10",
    ),
    "no layers": ("z-lab", set_value("dflash_config", to={}), "expected target_layer_ids, a list"),
    "missing Markov head": ("SpecForge", drop("markov_head"), "says markov_rank 8, .* those of 0"),
    "missing selector": (
        "incoai",
        drop("candidate_selector"),
        "says selector_rank 8, .* those of 0",
    ),
    "part of a gated link": (
        "speculators DSpark gated",
        drop("markov_head.gate_proj"),
        "says markov_head_type 'gated', .* those of 'vanilla'",
    ),
    "odd rotation": (
        "z-lab",
        set_value("rope_parameters", to={"rope_dim": 3}),
        "rope_dims must be even, got 3",
    ),
    "offsets beyond int32": (
        "speculators DSpark gated",
        put("d2t", lambda arrays: arrays["d2t"] + 2**32),
        "must be ids from 0 to 47",
    ),
    "ids without a head": (
        "z-lab",
        put("d2t", lambda arrays: mx.arange(20)),
        "lm_head.weight is missing, expected shape",
    ),
    "half of a link": ("DeepSpec", drop("markov_w2"), r"markov_head.markov_w2.weight is missing"),
    "missing layer": ("z-lab", drop("layers.1.mlp"), r"layers.1.mlp.down_proj.weight is missing"),
    "another number of layers": (
        "z-lab",
        set_value("num_hidden_layers", to=3),
        r"layers.2.input_layernorm.weight is missing",
    ),
    "projector": (
        "SpecForge",
        set_value("dflash_config", "projector_type", to="xpress"),
        "projector_type 'xpress', which is not supported",
    ),
    "noise levels": (
        "DeepSpec",
        set_value("log_snr_conditioning", to=True),
        "log_snr_conditioning",
    ),
    "joint projection": (
        "z-lab",
        put("layers.0.self_attn.qkv_proj.weight", lambda arrays: mx.zeros((4, 32))),
        "a joint projection",
    ),
    "activation": ("z-lab", set_value("hidden_act", to="gelu"), "hidden_act 'gelu', not 'silu'"),
    "kinds of layers": (
        "z-lab",
        set_value("layer_types", to=["full_attention", "linear_attention"]),
        "expected layer_types of 2 layers",
    ),
    "norms": (
        "z-lab",
        put("hidden_norm.weight", lambda arrays: arrays["hidden_norm.weight"] - 1),
        "expected norms that are stored as factors",
    ),
    "norms of the fork": (
        "Qwen3.5",
        put("hidden_norm.weight", lambda arrays: arrays["hidden_norm.weight"] + 1),
        "expected norms that are stored less one",
    ),
    "token ids twice": (
        "speculators DSpark gated",
        put("d2t", lambda arrays: -mx.arange(20)),
        "must be distinct ids",
    ),
    "whole model": (
        "DeepSpec",
        set_value("dspark_block_size", to=5),
        "expected a drafter, found a",
    ),
    "rope": (
        "z-lab",
        set_value("rope_parameters", to={"rope_type": "dynamic", "factor": 2.0}),
        "rope scaling must be one of",
    ),
    "recurrence behind the root": (
        "speculators DSpark rnn",
        set_value("sample_from_anchor", to=False),
        "a recurrent link needs first_slot 0",
    ),
}


def write(folder: Path, name: str, change: Change) -> Path:
    config = json.loads(json.dumps(LAYOUTS[name].config))
    arrays: dict[str, Any] = {key: mx.array(one) for key, one in tensors(LAYOUTS[name]).items()}
    change(config, arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, change, message = BAD[case]
    folder = write(tmp_path, name, change)
    assert recognise(folder)[0] is block
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_block(folder)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_config_contradicts_its_tensors(name: str, tmp_path: Path) -> None:
    """Other numbers than the tensors have, and flags in words, are refused by their keys."""
    config = json.loads(json.dumps(LAYOUTS[name].config))
    load_block(write(tmp_path, name, lambda config, arrays: None))
    for place in (config, *(one for one in config.values() if isinstance(one, dict))):
        for key, value in place.items():
            if key not in STATED:
                continue
            place[key] = str(value) if isinstance(value, bool) else value + 1
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(CheckpointError, match=key):
                load_block(tmp_path)
            place[key] = value


def test_a_trained_embedding_of_masks_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "z-lab", lambda config, arrays: None)
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"for masks \(mask_embedding.pt\), which is not"):
        load_block(folder)


def test_drafters_for_other_targets_are_refused() -> None:
    tokenizer = wrapped_tokenizer(VOCAB)
    target = Target(tiny_llama(vocab_size=VOCAB, layers=NUM_TARGET_LAYERS))
    deep = random_block(block_config(VOCAB, 32, captured_layers=(0, 5)))
    with pytest.raises(UnsupportedTargetError, match=r"layers 0 to 3 .* found 5"):
        deep.check_fit(target, tokenizer)
    for changes, message in (
        ({"num_target_layers": 9}, "expected a model of 9 layers, .* found one of 4"),
        ({"hidden_size": 64}, "hidden_size 64 does not match"),
        ({"vocab_size": 50}, "vocab_size 50 does not match"),
    ):
        other = random_block(BlockConfig(**{**vars(block_config(VOCAB, 32)), **changes}))
        with pytest.raises(CheckpointError, match=message):
            other.check_fit(target, tokenizer)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "cohere2", "granite", "muse_glimmer"])
def test_the_head_and_the_embedding_of_the_target(name: str) -> None:
    """Logits without scale and limit, and inputs of the first layer with the embedding's scale."""
    target = Target(build(tiny_config(name)))
    target.modules.watch([0])
    ids = mx.array([3, 8, 5])
    assert mx.allclose(
        target.modules.embed_input(ids), layer_inputs(target, ids, [0]), rtol=1e-4
    ).item()
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
    scales = mx.linspace(1.0, 2.0, levels)
    return LinkedLevels(
        network.link,
        outputs[None],
        unary[None],
        mx.array([7]),
        scales,
        rank,
        count,
        network.to_token_ids,
    )


@pytest.mark.parametrize("link", ["vanilla", "gated", "recurrent", "DFlash 2"])
def test_a_search_scores_every_path_by_the_one_formula(link: str) -> None:
    """Follow each node from the root by itself, and add up the formula's log-probabilities."""
    network = random_block(block_config(VOCAB, 32, **LINKS[link]), seed=3)
    shape = DraftShape(3, 1 + network.config.num_drafts)
    for count in (None, 12):
        levels = new_levels(network, count)
        found = search_all(levels, shape).alone
        again = new_levels(network, None)
        tokens, parents = to_ints(found.tokens), to_ints(found.parents)
        for node in range(0, len(tokens), 5):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            assert network.link is not None
            total, state, previous = 0.0, None, mx.array([7])
            for depth, step in enumerate(path):
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
            assert found.scores[node].item() == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("link", [None, *LINKS])
@pytest.mark.parametrize("count", [None, 12])
def test_a_chain_is_the_search_of_one_beam(link: str | None, count: int | None) -> None:
    config = {} if link is None else LINKS[link]
    network = random_block(block_config(VOCAB, 32, **config), seed=3)
    shape = DraftShape(1, 1 + network.config.num_drafts)
    found, expected = (
        new_levels(network, count).chain().alone,
        search_all(new_levels(network, count), shape).alone,
    )
    assert mx.array_equal(found.tokens, expected.tokens).item()
    assert mx.array_equal(found.parents, expected.parents).item()
    assert mx.allclose(found.scores, expected.scores, atol=1e-4).item()


def test_trees_of_scores_that_are_not_calibrated_are_not_worse_than_chains() -> None:
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
    places = zip(drafts.parents, drafts.tokens, strict=True)
    nodes = {place: node for node, place in enumerate(places, start=1)}
    node = count = 0
    for token in text:
        if (node, token) not in nodes:
            break
        node, count = nodes[node, token], count + 1
    return count


def test_candidates_are_those_that_the_noise_may_choose() -> None:
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


def test_a_confident_head_keeps_the_order_and_sets_the_best() -> None:
    config = block_config(
        VOCAB, 32, has_confidence=True, confidence_reads_token=True, **LINKS["vanilla"]
    )
    network = random_block(config, seed=1)
    plain, trusted = new_levels(network, None), new_levels(network, None)
    trusted.confidences = network.confidences
    before, after = plain.first()[0], trusted.first()[0]
    estimate = network.confidences(plain.outputs[0, :1], mx.array([7]))[0, 0]
    assert mx.max(after).item() == pytest.approx(estimate.item(), abs=1e-5)
    assert mx.array_equal(mx.argsort(before), mx.argsort(after)).item()

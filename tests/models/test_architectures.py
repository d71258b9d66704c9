"""Every supported architecture: trees against token-by-token decoding by stock mlx-lm."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRAEmbedding

from mlx_redrafter.decoding.step import decode
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.architectures import SUPPORTED, WRAPPERS
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.model_parts import find_parts
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.few_shapes import compile_passes, use_few_shapes
from tests.helpers.models import layer_inputs
from tests.models import tiny_models, trees
from tests.models.tiny_models import COMMON, VOCAB_SIZE, build, main_rope, tiny_config
from tests.models.trees import PROMPT, branching_tree, decode_paths, rows_of, verify_after_prompt

# One token and a tree differ by about 1e-6 of the largest logit in float32.
TOLERANCE = 2e-5
# A node at a wrong position differs by more than this.
VISIBLE = 1e-3
NUM_TOKENS = 17

MAIN_CASES = [(name, main_rope(name)) for name in SUPPORTED]
# Of the kinds of rope scaling that most families share, two others for each, in turn.
OTHER_CASES = [
    (name, ropes[(number + half * len(ropes) // 2) % len(ropes)])
    for number, (name, every) in enumerate(SUPPORTED.items())
    for ropes in [[rope for rope in every if rope != main_rope(name)]]
    for half in range(min(len(ropes), 2))
]
# Wrappers leave the forward pass to a model that is tested by its own name.
TEXT_MODELS = [name for name in SUPPORTED if WRAPPERS.get(name, (name,))[0] == name]
INNER_CASES = [(name, text) for name, texts in WRAPPERS.items() for text in texts[1:]]

# Model types that need numbers of a tree or a length on the host.
NOT_COMPILED = {
    "bailing_moe_v3", "dbrx", "gpt_bigcode", "internlm2", "internlm3", "jamba", "kimi_linear",
    "llama4", "mamba", "recurrent_gemma",
}  # fmt: skip

# Heads that are not called ``lm_head``; where there is none, the input embedding is the head.
HEADS = {"gpt_neox": "embed_out", "internlm2": "output", "phixtral": "linear"}


def disagreement(found: mx.array, expected: mx.array) -> float:
    """Largest difference, relative to the largest magnitude."""
    return float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected)))


def assert_agree(found: mx.array, expected: mx.array) -> None:
    """Check two arrays of logits, shape (N, V)."""
    assert disagreement(found, expected) <= TOLERANCE
    assert mx.argmax(found, axis=-1).tolist() == mx.argmax(expected, axis=-1).tolist()


def assert_tree_agrees(model: nn.Module, tree: TokenTree | None = None) -> None:
    """Hook a model and check that a tree gives what it gave before, token by token."""
    tree = tree or branching_tree()
    expected = decode_paths(model, tree)
    assert_agree(verify_after_prompt(Target(model), tree).logits, expected.logits)


def test_every_kind_of_rope_scaling_is_compared():
    kinds = {rope for ropes in SUPPORTED.values() for rope in ropes}
    assert kinds == {rope for _, rope in MAIN_CASES + OTHER_CASES}


@pytest.mark.parametrize(("model_type", "rope"), OTHER_CASES)
def test_tree_logits(model_type, rope):
    assert_tree_agrees(build(tiny_config(model_type, rope)))


@pytest.mark.parametrize(("model_type", "text_type"), INNER_CASES)
def test_tree_logits_of_other_inner_models(model_type, text_type):
    assert_tree_agrees(build(tiny_models.wrapper_config(model_type, text_type, "yarn")))


@pytest.mark.parametrize(("model_type", "rope"), MAIN_CASES)
def test_logits_and_hidden_states(model_type, rope):
    """Hidden states enter the head; logits of a wrong position differ."""
    model = build(tiny_config(model_type, rope))
    tree = branching_tree()
    unhooked = decode_paths(model, tree).logits
    target = Target(model)
    forward = verify_after_prompt(target, tree)
    assert_agree(forward.logits, unhooked)
    if model_type not in tiny_models.WITHOUT_POSITIONS:
        off_by_one = replace(tree, depths=tree.depths + 1)
        assert disagreement(verify_after_prompt(target, off_by_one).logits, unhooked) > VISIBLE
    expected = decode_paths(model, tree)
    assert disagreement(forward.hidden_states, expected.hidden_states) <= TOLERANCE
    assert forward.hidden_states.shape == (tree.num_nodes, target.hidden_size)
    assert target.modules.embed(tree.tokens).shape == (tree.num_nodes, target.hidden_size)
    assert target.vocab_size == VOCAB_SIZE
    # Models scale and cap their logits, which keeps the order.
    assert_agree(target.modules.logits(forward.hidden_states), forward.logits)
    logits = apply_head(model, model_type, forward)
    assert mx.argmax(logits, axis=-1).tolist() == mx.argmax(forward.logits, axis=-1).tolist()


def apply_head(model: nn.Module, model_type: str, forward: TargetOutputs) -> mx.array:
    modules = dict(model.named_modules())
    name = HEADS.get(model_type, "lm_head")
    if model_type == "talkie":  # a bare array
        return forward.hidden_states @ model.lm_head.T
    heads = [modules[path] for path in modules if path.rpartition(".")[2] == name]
    if not heads:
        return find_parts(model).embedding.as_linear(forward.hidden_states)
    return heads[0](forward.hidden_states)


@pytest.mark.parametrize("model_type", TEXT_MODELS)
@pytest.mark.parametrize("has_few_shapes", [False, True])
def test_generated_tokens_and_cache(model_type, has_few_shapes, monkeypatch):
    """Trees may attend to whole buckets, here of so few entries that short texts fill some."""
    if has_few_shapes:
        use_few_shapes(monkeypatch)
        compile_passes(monkeypatch, uses=2)
    model = build(tiny_config(model_type, main_rope(model_type)))
    stock_cache = make_prompt_cache(model)
    stock = ids(stock_tokens(model, PROMPT, NUM_TOKENS, prompt_cache=stock_cache))

    target = Target(model)
    cache = target.caches.new()
    drafts = trees.DraftsOnDevice([*PROMPT, *stock])
    if target.compiled.are_used:
        compile_passes(monkeypatch, uses=1)
    followed = trees.Followed(monkeypatch)
    options = {"cache": cache, "max_tokens": NUM_TOKENS, "keeps_cache": True}
    text = trees.sequence_of(target, PROMPT, drafts, **options)
    assert [token.id for token in decode(text)] == stock
    if target.compiled.are_used:
        assert bool(target.compiled.passes) == (model_type not in NOT_COMPILED)
        # The buffer of a tiny window has no room for the longest path.
        if not any(isinstance(part, SlidingCache) for part in cache.parts):
            assert bool(followed.count) == (model_type not in NOT_COMPILED)
    # Paths of all lengths were kept.
    assert len([count for count in text.delivery.stats.accepted_counts if count > 0]) >= 4

    for layer, stock_layer in zip(cache.stock, stock_cache, strict=True):
        assert num_tokens([layer]) == num_tokens([stock_layer])
        if not stock_layer.empty():
            for rows, stock_rows in zip(rows_of(layer), rows_of(stock_layer), strict=True):
                assert disagreement(rows, stock_rows) <= TOLERANCE


def test_dynamic_rope_before_its_base_grows_and_of_the_longest_chain():
    config = {
        **tiny_config("llama", "dynamic"),
        "max_position_embeddings": 4 * tiny_models.THRESHOLD,
    }
    assert_tree_agrees(build(config))
    assert_tree_agrees(build(tiny_config("internlm2", "dynamic")), trees.chain(MAX_BEAM_LENGTH))


@pytest.mark.parametrize(
    "model_type", ["dbrx", "deepseek_v3", "granitemoe", "mixtral", "phixtral", "qwen3_moe"]
)
def test_more_expert_choices_than_mlx_lm_leaves_unsorted(model_type):
    # mlx-lm sorts tokens by expert from 64 choices on.
    num_nodes = 40
    assert num_nodes * COMMON["num_experts_per_tok"] > 64
    assert_tree_agrees(
        build(tiny_config(model_type, main_rope(model_type))), trees.wide_tree(num_nodes)
    )


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "gpt2", "llama", "qwen3_moe", "starcoder2", "talkie", "LoRA"]
)
def test_quantised_or_with_lora_on_the_embedding(model_type):
    model: Any = build(tiny_config("llama" if model_type == "LoRA" else model_type))
    if model_type == "LoRA":
        model.model.embed_tokens = LoRAEmbedding.from_base(model.model.embed_tokens)
    else:
        nn.quantize(model, group_size=32, bits=4)
    assert_tree_agrees(model)
    parts = find_parts(model)
    assert (parts.hidden_size, parts.vocab_size) == (COMMON["hidden_size"], VOCAB_SIZE)


def test_packed_embedding():
    """Rows of the weights are packed; rows of hidden states are not."""
    config = tiny_config("prism_hadamard_qwen35")
    (packed,) = config["modules"]
    embedding = {**packed, "path": "model.embed_tokens", "embedding": True}
    wide = tiny_models.resized(config, hidden_size=512)
    model = build({**wide, "modules": [packed, embedding]})
    assert find_parts(model).embedding.weight.shape[-1] < 512
    target = Target(model)
    assert (target.hidden_size, target.vocab_size) == (512, VOCAB_SIZE)
    target.modules.watch([0])
    assert layer_inputs(target, mx.array(PROMPT), [0]).shape == (len(PROMPT), target.hidden_size)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode"])
def test_drafts_past_the_last_learned_position(model_type):
    num_positions = len(PROMPT) + 3
    model = build({**tiny_config(model_type), "n_positions": num_positions})
    tree = branching_tree()
    depths = to_ints(tree.depths)
    nodes = mx.array([n for n, depth in enumerate(depths) if len(PROMPT) + depth < num_positions])
    expected = decode_paths(model, tree).logits
    found = verify_after_prompt(Target(model), tree).logits
    assert_agree(found[nodes], expected[nodes])
    assert mx.all(mx.isfinite(found)).item()

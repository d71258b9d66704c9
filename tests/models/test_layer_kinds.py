"""Layers with windows, chunks or states: trees, memory and caches against stock mlx-lm."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.engine.stored_costs import blank_cache
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.target.target import Target
from tests.helpers.memory import peak_of
from tests.helpers.models import quantize_wide
from tests.models import tiny_models, trees
from tests.models.test_architectures import assert_agree, assert_tree_agrees, disagreement
from tests.models.tiny_models import WINDOW, Config, build, tiny_config, windowed_config
from tests.models.trees import PROMPT, branching_tree, decode_paths, verify_after_prompt

# One of each kind: three convolutions, one, groups of heads, no layer with rows, convolutions
# alone, layers with a state and rows, of all tokens and of a window; level by level, with one
# convolution or three, with windows, and without rows.
KINDS = [
    "olmo_hybrid", "qwen3_5", "granitemoehybrid", "mamba2", "lfm2", "falcon_h1", "baichuan_m1",
    "jamba", "kimi_linear", "recurrent_gemma", "mamba",
]  # fmt: skip


def test_a_text_without_positions_has_no_limit():
    limits = [Target(build(tiny_config(name))).context_length for name in ("qwen3_5", "mamba2")]
    assert limits == [tiny_models.COMMON["max_position_embeddings"], None]


# Prompts that are shorter than the kernel of the convolution, and as long.
@pytest.mark.parametrize(
    ("model_type", "length"),
    [
        (name, length)
        for number, name in enumerate(tiny_models.WITH_STATES)
        for length in (2, 3, 4, 5)
        if name in KINDS or (number - length) % 2 == 0
    ],
)
def test_tree_logits_after_short_prompts(monkeypatch, model_type, length):
    monkeypatch.setattr(trees, "PROMPT", PROMPT[:length])
    assert_tree_agrees(build(tiny_config(model_type)))


@pytest.mark.parametrize("model_type", KINDS)
def test_chains_and_wide_trees(model_type):
    model = build(tiny_config(model_type))
    for tree in (trees.chain(16), trees.wide_tree(40), branching_tree().padded(16)):
        expected = decode_paths(model, tree)
        found = verify_after_prompt(Target(model), tree)
        nodes = mx.arange(tree.num_nodes)
        assert_agree(found.logits[nodes], expected.logits[nodes])


@pytest.mark.parametrize("model_type", KINDS)
def test_quantised(model_type):
    model = build(tiny_config(model_type))
    quantize_wide(model)
    assert_tree_agrees(model)


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "qwen3_5", "mamba2"])
def test_half_precision(model_type):
    """A tree is as far from token by token as one chunk of mlx-lm's own is."""
    model = build(tiny_config(model_type))
    model.set_dtype(mx.bfloat16)
    tree = trees.chain(8)
    expected = decode_paths(model, tree).logits.astype(mx.float32)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    chunk = model(tree.tokens[None], cache=cache)[0].astype(mx.float32)
    found = verify_after_prompt(Target(model), tree).logits.astype(mx.float32)
    assert disagreement(found, expected) <= 1.5 * disagreement(chunk, expected)


def test_a_draft_that_is_not_a_number_spoils_its_branch_alone():
    model = build(tiny_config("mamba2"))  # attention to rows of NaN spoils all nodes
    tree = branching_tree()
    expected = decode_paths(model, tree).logits
    table = named_parameters(model)["backbone.embeddings.weight"]
    table[41] = mx.nan  # node 2
    found = verify_after_prompt(Target(model), tree).logits
    below = mx.array([2, 5, 10])
    assert mx.all(mx.isnan(found[below])).item()
    others = mx.array([n for n in range(11) if n not in (2, 5, 10)])
    assert_agree(found[others], expected[others])


def test_memory_does_not_hold_a_state_per_node():
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 8}
    target = Target(build(tiny_models.resized(tiny_config("qwen3_5"), **sizes)))
    state = 8 * 128 * 128 * 4

    def memory(num_nodes: int) -> tuple[int, int]:
        """Bytes at the peak of a tree, and after it."""
        cache, tree = blank_cache(target, 100), trees.wide_tree(num_nodes)
        mx.eval(tree.arrays)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(target.verify(tree, cache).logits)
        return int(mx.get_peak_memory()) - before, int(mx.get_active_memory()) - before

    (peak, held), (peak_of_few, held_by_few) = memory(64), memory(4)
    assert peak - peak_of_few < 16 * state  # the activations of 60 nodes, not 60 states
    # A key, an update and the inputs of the convolution.
    assert held - held_by_few < 60 * 8 * (128 + 128 + 3 * 128) * 4


def cache_after(model: nn.Module, num_texts: int = 1) -> list[Any]:
    """A stock cache after a few tokens."""
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT] * num_texts), cache=cache)
    return cache


DAMAGE: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "state": (lambda cache: cache[0].cache.__setitem__(1, cache[0][1][:, :1]),
        "state of the shapes .* in layer 0, the model's has"),
    "half a state": (lambda cache: cache[0].cache.__setitem__(1, None),
        "state of the shapes .* in layer 0, the model's has"),
    "no state": (lambda cache: setattr(cache[0], "cache", [None, None]),
        "layers of 12 tokens and others whose state"),
    "no rows": (lambda cache: cache.__setitem__(1, KVCache()),
        "layers of 0 tokens and others whose state"),
    "padding": (lambda cache: setattr(cache[0], "left_padding", mx.array([1])),
        "a batch of 1 texts"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_prompt_caches_are_refused(kind):
    model = build(tiny_config("qwen3_5"))
    cache = cache_after(model)
    Target(model).caches.new(cache)
    damage, words = DAMAGE[kind]
    damage(cache)
    with pytest.raises(ConfigError, match=words):
        Target(model).caches.new(cache)


def test_prompt_caches_of_others_are_refused():
    model = build(tiny_config("qwen3_5"))
    with pytest.raises(ConfigError, match="batch of 2 texts"):
        Target(model).caches.new(cache_after(model, num_texts=2))
    with pytest.raises(UnsupportedTargetError, match=r"expected ArraysCache\(\) .*found KVCache"):
        Target(model).caches.new([KVCache(), KVCache()])
    mamba = build(tiny_config("mamba2"))
    Target(mamba).caches.new(make_prompt_cache(mamba))
    with pytest.raises(ConfigError, match="does not say how many tokens it holds"):
        Target(mamba).caches.new(cache_after(mamba))


@pytest.mark.parametrize("num_experts", [0, 8])
def test_the_whole_config_of_a_text_model(num_experts):
    """Files without ``text_config`` have its values at the top."""
    inner: Config = tiny_models.wrapper_config("qwen3_5", "qwen3_5")["text_config"]
    assert_tree_agrees(build({**inner, "model_type": "qwen3_5", "num_experts": num_experts}))


# One model of each kind of mask.
MASKS = "gemma3_text", "gpt_oss", "llama4", "smollm3"


# The prompt ends before the window is full, when it is, after it, and has wrapped several times;
# some windows are smaller than the tree is deep. The `MASKS` have all windows.
@pytest.mark.parametrize(
    ("model_type", "window"),
    [
        (name, window)
        for number, name in enumerate(tiny_models.WITH_WINDOWS)
        for place, window in enumerate([1, 3, 6, 11, 12, 13, 15, 30])
        if name in MASKS or (number - place) % 4 == 0
    ],
)
def test_tree_logits_around_the_window(model_type, window):
    assert_tree_agrees(build(windowed_config(model_type, window)))


def test_memory_of_windows_does_not_grow_with_the_text():
    config = {**windowed_config("muse_glimmer", 100), "layer_types": ["sliding_attention"] * 2}
    target = Target(build(config))

    def peak(length: int) -> int:
        cache, tree = blank_cache(target, length), branching_tree()
        for _ in range(2):  # the first tree makes the buffers
            mx.eval(target.verify(tree, cache).logits)
            cache.commit([0, 1])
        return peak_of(lambda: mx.eval(target.verify(tree, cache).logits))

    # A bool for each position would be a million bytes; other threads' arrays are some thousands.
    assert peak(10**6) < peak(1000) + 10**5


def test_caches_of_other_kinds_are_refused():
    target = Target(build(windowed_config("gemma3_text")))
    for wrong in (RotatingKVCache(WINDOW, keep=4), RotatingKVCache(WINDOW + 1)):
        _, full = make_prompt_cache(target.model)
        found = rf"found RotatingKVCache\(max_size={wrong.max_size}, keep={wrong.keep}\)"
        with pytest.raises(UnsupportedTargetError, match=found):
            target.caches.new([wrong, full])

"""Layers with sliding windows or chunks: trees, texts and prompt caches against stock mlx-lm.

Axes: N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_redrafter import Engine
from mlx_redrafter.engine.profiling import blank_cache
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.caches.tree_pass import Layout
from mlx_redrafter.target.target import Target
from tests.helpers.equality import assert_same_tokens, stock_tokens
from tests.helpers.memory import peak_of
from tests.helpers.models import wrapped_tokenizer
from tests.models.test_architectures import VISIBLE, assert_tree_agrees, disagreement
from tests.models.tiny_models import VOCAB_SIZE, WINDOW, WITH_WINDOWS, build, windowed_config
from tests.models.trees import branching_tree, decode_paths, verify_after_prompt

# One model of each kind of mask.
MASKS = "gemma3_text", "gpt_oss", "llama4", "smollm3"


# The prompt ends before the window is full, when it is, after it, and has wrapped several times;
# some windows are smaller than the tree is deep. The `MASKS` have all windows.
@pytest.mark.parametrize(
    ("model_type", "window"),
    [
        (name, window)
        for number, name in enumerate(WITH_WINDOWS)
        for place, window in enumerate([1, 3, 6, 11, 12, 13, 15, 30])
        if name in MASKS or (number - place) % 4 == 0
    ],
)
def test_tree_logits_around_the_window(model_type: str, window: int) -> None:
    assert_tree_agrees(build(windowed_config(model_type, window)))


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("model_type", MASKS)
def test_a_mask_off_by_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model_type: str, wrong: int
) -> None:
    model = build(windowed_config(model_type, 6))
    tree = branching_tree()
    expected = decode_paths(model, tree).logits
    for name in ("window_mask", "chunk_mask"):
        mask = getattr(Layout, name)
        monkeypatch.setattr(
            Layout, name, lambda self, size, mask=mask: mask(self, size and size + wrong)
        )
    found = verify_after_prompt(Target(model), tree).logits
    assert disagreement(found, expected) > VISIBLE


def test_memory_does_not_grow_with_the_text() -> None:
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


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama4"])
def test_prompts_share_their_passes(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    model, shapes, compute = build(windowed_config(model_type, 20)), [], Target.compute

    def counted(target: Target, chunks: mx.array, *others: Any) -> Any:
        shapes.append(chunks.shape)
        return compute(target, chunks, *others)

    monkeypatch.setattr(Target, "compute", counted)
    prompts = [[(3 * n + k) % VOCAB_SIZE for k in range(n)] for n in (17, 40, 18, 41)]
    tokens: list[list[int]] = [[] for _ in prompts]
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), None)
    for response in engine.stream_batch(prompts, max_tokens=40):
        tokens[response.number].append(response.response.token)
    assert shapes[:3] == [(4, 16), (2, 23), (4, 2)]
    for prompt, found in zip(prompts, tokens, strict=True):
        assert_same_tokens(stock_tokens(model, prompt, 40), found)


def test_caches_of_other_kinds_are_refused() -> None:
    target = Target(build(windowed_config("gemma3_text")))
    for wrong in (RotatingKVCache(WINDOW, keep=4), RotatingKVCache(WINDOW + 1)):
        _, full = make_prompt_cache(target.model)
        found = rf"found RotatingKVCache\(max_size={wrong.max_size}, keep={wrong.keep}\)"
        with pytest.raises(UnsupportedTargetError, match=found):
            target.caches.new([wrong, full])

"""Block drafters leave every text as stock mlx-lm has it, whatever they propose."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.target.target import Target
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, stream, tokens
from tests.helpers.models import tiny_llama, tiny_qwen3
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config

PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
NUM_TOKENS = 16
MODELS: dict[str, nn.Module] = {
    "llama": tiny_llama(seed=4, vocab_size=VOCAB_SIZE),
    "qwen3": tiny_qwen3(seed=2, vocab_size=VOCAB_SIZE),
    "qwen3_5": build(tiny_config("qwen3_5")),
    "gemma3": build(tiny_config("gemma3_text")),
    "qwen3_moe": build(tiny_config("qwen3_moe")),
}
# Links of each model's drafters.
TRIED = {
    "llama": list(LINKS),
    "qwen3": ["DFlash 2"],
    "qwen3_5": ["vanilla"],
    "gemma3": ["DFlash"],
    "qwen3_moe": ["recurrent"],
}
CHAIN: dict[str, Any] = {"beam_width": 1, "beam_length": 5}
TREE: dict[str, Any] = {"beam_width": 3, "beam_length": 5, "tree_nodes": 12}
# Logit that is added to the text's own token, for drafts that the target accepts.
BONUS = 50.0
# Share of depths where it is.
ACCURACY = 0.7


class Scripted:
    """Make drafts right: add `BONUS` to the logits of a known text at most depths."""

    def __init__(self, patch: pytest.MonkeyPatch, prompt: list[int], script: list[int]):
        self.text = [*prompt, *script]
        self.rng = random.Random(3)
        self.following: list[int] = []
        surround, logits = BlockNetwork.surround, BlockNetwork.logits

        def reading(network: BlockNetwork, drafting: Any, flight: Pass) -> Any:
            bonus = flight.length + len(flight.rows)
            self.following = self.text[bonus + 1 :]
            return surround(network, drafting, flight)

        def scoring(network: BlockNetwork, outputs: mx.array, target: Target) -> mx.array:
            found = logits(network, outputs, target)
            for depth, token in enumerate(self.following[: len(found)]):
                if self.rng.random() < ACCURACY:
                    found[depth, token] += BONUS
            return found

        patch.setattr(BlockNetwork, "surround", reading)
        patch.setattr(BlockNetwork, "logits", scoring)


def network_for(model: nn.Module, link: str, **changes: Any) -> BlockNetwork:
    target = Target(model)
    config = block_config(target.vocab_size, target.hidden_size, **{**LINKS[link], **changes})
    return random_block(config, seed=len(link))


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    expected = stock_tokens(model, PROMPT, NUM_TOKENS)
    sampling = {"temp": 0.8, "seed": 11, "max_tokens": NUM_TOKENS}
    sampled = tokens(model, PROMPT, **sampling)
    Scripted(monkeypatch, PROMPT, ids(expected))
    for link in TRIED[name]:
        network, accepted = network_for(model, link), 0
        for shape in (CHAIN, TREE):
            options = {"max_tokens": NUM_TOKENS, "prefill_step_size": 4, **shape}
            found = list(stream(model, PROMPT, network, **options))
            assert_same_tokens(expected, [r.token for r in found], (link, shape))
            accepted += sum(r.from_draft for r in found)
            assert tokens(model, PROMPT, network, **sampling, **shape) == sampled
        assert accepted > NUM_TOKENS / 2, "the drafts are accepted often enough to matter"


def test_turns_and_files_of_one_prompt_cache(tmp_path: Any) -> None:
    """Texts go on in the caches of the target alone, and in those of the drafter too."""
    model, path = MODELS["gemma3"], str(tmp_path / "cache.safetensors")
    network = network_for(model, "DFlash 2")
    for own in ([], make_prompt_cache(network)):
        stock, shared = make_prompt_cache(model), make_prompt_cache(model) + own
        for turn in (PROMPT, [60], [7, 8, 9]):
            expected = ids(stock_tokens(model, turn, 9, prompt_cache=stock))
            options: dict[str, Any] = {"max_tokens": 9, "prompt_cache": shared, **TREE}
            assert tokens(model, turn, network, **options) == expected
            save_prompt_cache(path, shared)
            shared = load_prompt_cache(path)
    held = [layer.keys.shape[2] for layer in shared[-2:]]
    assert held[1] <= held[0], "a window keeps no more entries than the whole text has"


def test_long_texts_keep_windows_bounded() -> None:
    """Buffers of windowed layers drop what no window reaches, and the texts stay equal."""
    model = MODELS["llama"]
    network = network_for(model, "vanilla", windows=(6, 9), causal=(True, False))
    cache = make_prompt_cache(model) + make_prompt_cache(network)
    prompt = [token % VOCAB_SIZE for token in range(7, 440)]
    expected = ids(stock_tokens(model, prompt, 20))
    options: dict[str, Any] = {"max_tokens": 20, "prompt_cache": cache, **CHAIN}
    assert tokens(model, prompt, network, prefill_step_size=64, **options) == expected
    assert all(layer.keys.shape[2] <= 320 for layer in cache[-2:])

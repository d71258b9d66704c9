"""Block drafters leave every text as stock mlx-lm has it, whatever they propose."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest

from mlx_redrafter import stream_generate
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.target.target import Target
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.equality import assert_same_tokens, stock_tokens
from tests.helpers.models import tiny_llama, tiny_qwen3, wrapped_tokenizer
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config

PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
NUM_TOKENS = 24
MODELS: dict[str, nn.Module] = {
    "llama": tiny_llama(seed=4, vocab_size=VOCAB_SIZE),
    "qwen3": tiny_qwen3(seed=2, vocab_size=VOCAB_SIZE),
    "qwen3_5": build(tiny_config("qwen3_5")),
    "gemma3": build(tiny_config("gemma3_text")),
    "qwen3_moe": build(tiny_config("qwen3_moe")),
}
SHAPES: list[dict[str, Any]] = [
    {"beam_width": 1, "beam_length": 5},
    {"beam_width": 3, "beam_length": 5, "tree_nodes": 12},
    {"beam_width": 2, "beam_length": 4, "select": "beam"},
]


def network_for(model: nn.Module, link: str) -> BlockNetwork:
    target = Target(model)
    config = block_config(VOCAB_SIZE, target.hidden_size, **LINKS[link])
    return random_block(config, seed=len(link))


def tokens(model: nn.Module, network: BlockNetwork | None, **options: Any) -> list[int]:
    prompt = options.pop("prompt", PROMPT)
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    return [r.token for r in stream_generate(model, tokenizer, prompt, drafter=network, **options)]


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_plain_decoding(name: str) -> None:
    model = MODELS[name]
    expected = stock_tokens(model, PROMPT, NUM_TOKENS)
    sampling = {"temp": 0.8, "seed": 11, "max_tokens": NUM_TOKENS}
    sampled = tokens(model, None, **sampling)
    for link in LINKS if name == "llama" else ("DFlash 2", "recurrent"):
        network = network_for(model, link)
        for shape in SHAPES:
            found = tokens(model, network, max_tokens=NUM_TOKENS, prefill_step_size=4, **shape)
            assert_same_tokens(expected, found, (link, shape))
            assert tokens(model, network, **sampling, **shape) == sampled

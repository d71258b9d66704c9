"""EAGLE heads leave every text as stock mlx-lm has it, whatever they propose."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from tests.helpers.equality import assert_same_tokens, assert_turns, stock_tokens, tokens
from tests.helpers.models import tiny_llama, tiny_qwen3
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config

PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
NUM_TOKENS = 14
MODELS: dict[str, nn.Module] = {
    "llama": tiny_llama(seed=4, vocab_size=VOCAB_SIZE),
    "qwen3": tiny_qwen3(seed=2, vocab_size=VOCAB_SIZE),
    "gemma2": build(tiny_config("gemma2")),
}
SHAPES: list[dict[str, Any]] = [
    {},
    {"beam_width": 1, "beam_length": 6},
    {"beam_width": 3, "beam_length": 5, "tree_nodes": 12},
]


KINDS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"version": 1},
    "EAGLE-3": {"version": 3, "draft_vocab_size": 70, "captured_layers": (0, 1, 1)},
    "windows": {
        "version": 3,
        "captured_layers": (0, 1, 2),  # 2 is the last output of these models
        "num_hidden_layers": 2,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 4,
    },
    "P-EAGLE": {
        "version": 3,
        "captured_layers": (0, 1, 1),
        "mask_token_id": 3,
        "max_length": 6,
        "own_embedding": True,
    },
    "without fc": {"version": 3, "reads_hidden_state": True},
}


def _head(model: nn.Module, kind: str) -> Eagle:
    embedding: Any = model
    hidden_size = embedding.model.embed_tokens.weight.shape[1]
    mx.random.seed(list(KINDS).index(kind))
    config = EagleConfig(
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        **KINDS[kind],
    )
    head = Eagle(config)
    mx.eval(head.parameters())
    return head


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", kind) for kind in KINDS]
    + [("qwen3", "EAGLE-3"), ("qwen3", "windows"), ("gemma2", "EAGLE-1"), ("gemma2", "P-EAGLE")],
)
def test_texts_are_those_of_plain_decoding(name: str, kind: str) -> None:
    model = MODELS[name]
    head = _head(model, kind)
    expected = stock_tokens(model, PROMPT, NUM_TOKENS)
    sampling = {"temp": 0.8, "seed": 11, "max_tokens": NUM_TOKENS}
    sampled = tokens(model, PROMPT, **sampling)
    # How much is drafted depends on the first one, which times its steps.
    for shape in SHAPES if (name, kind) == ("llama", "EAGLE-3") else SHAPES[1:]:
        options = {"max_tokens": NUM_TOKENS, "prefill_step_size": 4, **shape}
        assert_same_tokens(expected, tokens(model, PROMPT, head, **options), shape)
        assert tokens(model, PROMPT, head, **sampling, **shape) == sampled
    assert tokens(model, PROMPT, head, couple=False, **sampling, **SHAPES[2]) == sampled


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "EAGLE-1"), ("qwen3", "EAGLE-3"), ("gemma2", "windows"), ("llama", "P-EAGLE")],
)
def test_turns_on_one_prompt_cache(name: str, kind: str) -> None:
    """With the target's layers alone, and with those of the head after them."""
    model, turns = MODELS[name], [PROMPT, [60], [7, 8, 9]]
    head = _head(model, kind)
    assert_turns(model, head, turns, **SHAPES[1])
    # Every turn leaves out one pair.
    assert_turns(model, head, turns, make_prompt_cache(head), behind=1, **SHAPES[2])

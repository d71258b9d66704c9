"""Every architecture whose layers attend to all tokens: texts in a batch against stock mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.fixed import FixedPolicy
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.caches.cache_kinds import parts_of
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.target import Target
from tests.models.test_architectures import TOLERANCE, disagreement
from tests.models.tiny_models import build, main_rope, tiny_config
from tests.models.trees import PLAN, PROMPT, ScriptedDrafts, rows_of

# Prompts and lengths of the texts; those in a batch differ in both.
TEXTS = [(PROMPT, 24), (PROMPT[:3], 9), (PROMPT[::-1] * 2, 17), (PROMPT[4:], 20), ([5], 3)]
# The forward pass before which each of them comes.
ARRIVALS = [0, 0, 0, 4, 6]


def stock_text(model: nn.Module, prompt: list[int], num: int) -> tuple[list[int], list[KVCache]]:
    """What stock mlx-lm generates greedily, with its cache afterwards."""
    cache = make_prompt_cache(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=num, prompt_cache=cache)
    return [int(token) for token, _ in steps], cache


@pytest.mark.parametrize("model_type", SUPPORTED)
@pytest.mark.usefixtures("few_shapes_or_not")
def test_texts_that_come_and_go(model_type: str) -> None:
    model = build(tiny_config(model_type, main_rope(model_type)))
    target = Target(model)
    expected = [stock_text(model, prompt, num) for prompt, num in TEXTS]
    texts, found, scheduler = [], [], Scheduler(target)
    for number, (prompt, num) in enumerate(TEXTS):
        request = Request(prompt, max_tokens=num, leave_as_stock=True)
        chooser = KeyedSampler(SamplingParams(), target.vocab_size)
        # Every third text decodes plainly.
        drafts = (ScriptedDrafts(expected[number][0]), FixedPolicy(PLAN)) if number % 3 else ()
        texts.append(SequenceDecoder(target, target.new_cache(), chooser, request, *drafts))
        found.append([])
    step = 0
    while step == 0 or not all(text.is_closed for text in texts):
        scheduler.begin([texts[number] for number, when in enumerate(ARRIVALS) if when == step])
        for text, tokens, error in scheduler.step_all():
            assert error is None
            found[texts.index(text)] += text.deliver(tokens)
            if text.is_finished:
                scheduler.leave(text)
                text.close()
        step += 1
    for text, tokens, (stock, stock_cache) in zip(texts, found, expected, strict=True):
        assert [token.id for token in tokens] == stock
        layers = zip(parts_of(text.cache.stock), parts_of(stock_cache), strict=True)
        for layer, stock_layer in layers:
            assert num_tokens([layer]) == num_tokens([stock_layer])
            if not stock_layer.empty():
                for rows, stock_rows in zip(rows_of(layer), rows_of(stock_layer), strict=True):
                    assert disagreement(rows, stock_rows) <= TOLERANCE

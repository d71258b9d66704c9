"""States of a target's layers, and logits of states."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.decoding import prefill as decoding_prefill
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.target.modules import FINAL
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.models import tiny_llama
from tests.models.tiny_models import build, tiny_config
from tests.models.trees import ScriptedDrafts

PROMPT = [5, 17, 3, 60, 9, 12, 7]
LAYERS = (2, 0, FINAL)


def _layer_inputs(model: Any, tokens: list[int]) -> mx.array:
    """Inputs of layers 2 and 0 and the final output, one layer after another."""
    h = model.model.embed_tokens(mx.array([tokens]))
    inputs = []
    for layer in model.model.layers:
        inputs.append(h)
        h = layer(h, "causal", None)
    return mx.concatenate([inputs[2], inputs[0], model.model.norm(h)], axis=-1)[0]


class _States(ScriptedDrafts):
    """Keeps the states of a prompt, its last token included, and proposes nothing."""

    layers = LAYERS

    def __init__(self) -> None:
        super().__init__([])
        self.reader: Any = self
        self.found: list[mx.array] = []

    def read(self, states: mx.array) -> None:
        self.found.append(states)

    def skip(self, flight: Pass) -> None:
        if self.num_known == 0:
            assert flight.states is not None
            self.found.append(flight.states)
        super().skip(flight)


def test_states_of_prompts_that_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_prefill, "MAX_END", 3)
    model = tiny_llama(seed=4)
    target = Target(model)
    target.modules.watch(LAYERS)
    texts = []
    for length in (12, 7, 8, 1, 7):
        request = Request([*PROMPT, *range(20, 30)][:length], max_tokens=3)
        sampler = KeyedSampler(SamplingParams(), target.vocab_size)
        texts.append(SequenceDecoder(target, target.caches.new(), sampler, request, _States()))
    scheduler = Scheduler(target)
    scheduler.begin(texts)
    while not all(text.is_finished for text in texts):
        scheduler.step_all()
    for text in texts:
        assert isinstance(text.drafting, _States)
        found = mx.concatenate(text.drafting.found)
        assert mx.allclose(found, _layer_inputs(model, text.request.prompt), atol=1e-5).item()


def test_states_are_those_of_the_layers_and_logits_stay() -> None:
    model = tiny_llama(seed=4)
    plain = Target(tiny_llama(seed=4))
    target = Target(model)
    target.modules.watch(LAYERS)
    prompt = mx.array(PROMPT)
    expected = _layer_inputs(model, [*PROMPT, 8, 9])
    cache, other = target.caches.new(), plain.caches.new()
    parts = prompt[:4], prompt[4:6]
    chunks = [target.process_chunk(part, cache, LAYERS).states for part in parts]
    outputs = target.advance(prompt[6:], cache, LAYERS)
    reference = prefill(plain, prompt, other, 4)
    assert reference.states is None
    assert mx.array_equal(outputs.logits, reference.logits).item()
    states = mx.concatenate([*chunks, outputs.states])
    assert mx.allclose(states, expected[: len(PROMPT)], atol=1e-5).item()
    tree = TokenTree.of([8, 9, 30], [0, 0, 0])
    outputs, reference = target.verify(tree, cache, LAYERS), plain.verify(tree, other)
    assert mx.array_equal(outputs.logits, reference.logits).item()
    assert mx.allclose(outputs.states[:2], expected[len(PROMPT) :], atol=1e-5).item()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "granite", "gpt_neox"])
def test_logits_of_states_are_the_models(model_type: str) -> None:
    """With the scales and caps that models have after their heads."""
    target = Target(build(tiny_config(model_type)))
    outputs = target.advance(mx.array([7]), target.caches.new())
    assert mx.allclose(
        target.modules.logits(outputs.hidden_states), outputs.logits, atol=1e-5
    ).item()


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"layers 0 to 2 of the target .* found 4"):
        Target(tiny_llama()).modules.watch((0, 4))

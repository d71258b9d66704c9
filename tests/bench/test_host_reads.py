"""Reads from the device in a drafted step, and whether the device waits for the host."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx

from mlx_redrafter import device_read
from mlx_redrafter.bench.lab.contexts import COMMON
from mlx_redrafter.decoding.delivery import Request
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.prefill import prefill
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import Inputs, Lane, Noises, step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.compiled_pass import CompiledPasses
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Tokens of the prompt.
LENGTH = 64
# Steps that are not counted.
WARM_UP = 3


class Steps(NamedTuple):
    """Reads of each step, and whether the verify was dispatched before the host read the drafts."""

    reads: list[int]
    are_ahead: list[bool]


def count_reads(config: Mapping[str, Any], compiled: bool, steps: int) -> Steps:
    """Decode a text with random drafts by fixed chains."""
    model, size = make_model("a random model", config), COMMON["hidden_size"]
    drafter = Drafter(DrafterConfig(COMMON["vocab_size"], size, size, 1, rnn=True))
    mx.eval(model.parameters(), drafter.parameters())
    target, prompt = Target(model), list(range(LENGTH))
    target.compiled = CompiledPasses(compiled)
    text = SequenceDecoder(
        target,
        target.caches.new(),
        KeyedSampler(SamplingParams(), target.vocab_size),
        Request(prompt),
        drafter.open(target, prompt, True, []),
        FixedPolicy(DraftPlan.of(1, 5, 5)),
    )
    found, reads, wait = Steps([], []), 0, device_read.waiting

    class Watched(Lane):
        """Notes the number of reads at the end of drafting, and compares it at the verify."""

        before, is_ahead = 0, False

        def look_ahead(self, sequence: SequenceDecoder) -> bool:
            self.before = reads
            return super().look_ahead(sequence)

        def verify(self, inputs: Inputs, noises: Noises) -> dict[SequenceDecoder, Pass]:
            is_tree = any(isinstance(one, TokenTree) for one in inputs.values())
            self.is_ahead = is_tree and reads == self.before
            return super().verify(inputs, noises)

    lane = Watched()

    def count() -> AbstractContextManager[None]:
        nonlocal reads
        reads += 1
        return wait()

    for _ in prefill([text]):
        pass
    with patch.object(device_read, "waiting", count), target.compiled.warming_up():
        for _ in range(steps + WARM_UP):
            start = reads
            step(lane, [text])
            text.take()
            found.reads.append(reads - start)
            found.are_ahead.append(lane.is_ahead)
    return Steps(found.reads[WARM_UP:], found.are_ahead[WARM_UP:])


def test_a_compiled_pass_lets_the_device_go_on_without_a_read() -> None:
    config = {**COMMON, "model_type": "llama", "num_hidden_layers": 1}
    plain, compiled = (count_reads(config, one, 12) for one in (False, True))
    assert plain.reads == compiled.reads == [1] * 12
    assert not any(plain.are_ahead)
    assert all(compiled.are_ahead)

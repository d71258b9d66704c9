"""The step of a sequence in its own cache."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.prefill import prefill
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder, Status
from mlx_redrafter.decoding.step import Inputs, Lane, Noises, step
from mlx_redrafter.trees.tree import TokenTree


class LoneLane(Lane):
    """A `Lane` of one sequence, with the cheapest operations for it."""

    def noises(
        self, sequences: Sequence[SequenceDecoder], num_levels: int
    ) -> Sequence[GumbelNoise | None]:
        (one,) = sequences
        last = one.last
        assert last is not None
        further = last.num_accepted, last.max_accepted
        return [one.sampler.noise(last.length + 1, num_levels, *further)]

    def look_ahead(self, sequence: SequenceDecoder) -> bool:
        reads_first = sequence.processors is not None
        reads_first |= not isinstance(sequence.sampler, KeyedSampler)
        reads_first |= sequence.own_cache.needs_notice
        return not reads_first and sequence.target.compiled.are_used

    def follow(self, sequence: SequenceDecoder, tree: TokenTree) -> bool:
        last = sequence.last
        assert last is not None
        assert last.path is not None
        longest, cache = last.max_accepted + 1, sequence.own_cache
        follows = sequence.target.compiled.may_follow(tree, cache, sequence.layers, longest)
        if follows:
            cache.follow(last.path, last.num_accepted)
        return follows

    def verify(self, inputs: Inputs, noises: Noises) -> dict[SequenceDecoder, Pass]:
        ((one, drafts),) = inputs.items()
        if not isinstance(drafts, TokenTree):
            return {one: one.advance(drafts)}
        outputs = one.target.verify(drafts, one.own_cache, one.layers)
        if one.target.compiled.is_first_use:
            one.delivery.clock.skip()
        return {one: one.sample(drafts, outputs, noises[one])}


# It has no state, so all sequences share it.
ALONE = LoneLane()


def step_alone(sequence: SequenceDecoder) -> None:
    """Decode one step of a sequence in its own cache, unless it has something to take.

    Before the first step, process the prompt, or what is left of it.
    """
    if sequence.status is Status.WAITING:
        for _ in prefill([sequence]):
            pass
    if sequence.outbox.is_empty and not sequence.is_finished:
        step(ALONE, [sequence])

"""Drafters made worse on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
from mlx.utils import tree_map

from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter

# Factor of the scores of a drafter that is less sure than it should be.
FLAT = 0.3
# Factor of the scores of a drafter that is surer than it should be.
SHARP = 3.0
# Standard deviation of the noise in the weights of a badly trained drafter, in those of a weight.
NOISE = 0.25


def _scale(drafter: Drafter, factor: float) -> None:
    drafter.lm_head[-1].weight = drafter.lm_head[-1].weight * factor


def _add_noise(drafter: Drafter) -> None:
    mx.random.seed(0)

    def noisy(weight: mx.array) -> mx.array:
        return weight + NOISE * mx.std(weight) * mx.random.normal(weight.shape, weight.dtype)

    drafter.update(tree_map(noisy, drafter.parameters()))


# Changes to a recurrent drafter, in place.
CHANGES: Mapping[str, Callable[[Drafter], object]] = {
    "flat": lambda drafter: _scale(drafter, FLAT),
    "sharp": lambda drafter: _scale(drafter, SHARP),
    "noisy": _add_noise,
    "4 bits": lambda drafter: quantize_drafter(drafter, 4, 64),
}

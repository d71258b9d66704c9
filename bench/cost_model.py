"""Cost of a step on a chip, from the chip's hardware and the time of a plain step there.

Speeds that follow from it are always marked as predictions.

For 16-bit weights on M1 and M2, with the kernels of MLX up to 0.30.4 (up to 15 tokens in one
16-row tile, 16 and more by a general matrix product):

    step = base * plain + fixed + draft * (L - 1) * drafter's share * plain
           + row * T * 2 P / FLOP/s + cliff if T >= 16

Theory says base = draft = row = 1: weights are read once per forward pass, and arithmetic runs at
the chip's peak and is not hidden. It also says fixed = cliff = 0. `FITTED` has the values that fit
Apple's measurements; the laboratory computes them (`lab/validation.py`).

Axes: T tokens per forward pass, P parameters of the target, L beam length.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from mlx_redrafter.bench.chips import BYTES, CURVES, WIDE_KERNELS, Chip, VerifyCurve, find_curve
from mlx_redrafter.errors import ConfigError

# Share of the bandwidth that plain decoding reaches; 0.72, 0.85 and 0.67 in Apple's sweeps.
BANDWIDTH_SHARE = 0.75
# Minimum number of tokens for which MLX up to 0.30.4 used a general matrix product.
CLIFF_TOKENS = 16
# Parameters of Vicuna-7B, the model that the cliff was measured with.
CLIFF_PARAMETERS = 6.74e9


@dataclass(frozen=True)
class Parameters:
    """Parameters of the cost model; the module's docstring has the equation.

    ``fixed`` and ``cliff`` are in milliseconds. The cliff is that of a model of 6.74B parameters: a
    matrix product too small for the GPU takes the time of its inner loop, layers times hidden size
    in all, hence it grows with the number of parameters to the power 2/3.
    """

    base: float
    fixed: float
    draft: float
    row: float
    cliff: float


# Parameters fitted by the laboratory to all three of Apple's sweeps; a test checks the values.
FITTED = Parameters(base=1.0613, fixed=3.939, draft=1.0632, row=1.1883, cliff=37.91)


@dataclass(frozen=True)
class Question:
    """A pair and a chip to predict for."""

    chip: Chip
    num_parameters: float  # of the target that a token reads
    bits: int  # of the target's weights: 32, 16, 8 or 4
    drafter_parameters: float  # read per level of drafting: all but embeddings
    plain: float | None = None  # measured milliseconds of a plain step; None predicts them

    @property
    def plain_step(self) -> float:
        """Milliseconds of a plain step, measured or predicted."""
        if self.plain is not None:
            return self.plain
        bandwidth = BANDWIDTH_SHARE * self.chip.bandwidth * 1e6
        return self.num_parameters * BYTES[self.bits] / bandwidth

    @property
    def drafter_share(self) -> float:
        """Bytes read per level of drafting, as a share of those of a plain step."""
        read = self.drafter_parameters * BYTES[16]
        return read / (self.num_parameters * BYTES[self.bits])

    @property
    def has_model(self) -> bool:
        """Whether the fitted cost model covers the chip."""
        return self.bits == 16 and self.chip.generation < WIDE_KERNELS

    @property
    def curve(self) -> VerifyCurve | None:
        """Published curve to use; None if the cost model or the roofline is used."""
        return None if self.has_model else find_curve(self.chip, self.bits)

    def arithmetic(self, tokens: float) -> float:
        """Milliseconds of the arithmetic of T tokens at the chip's peak."""
        return tokens * 2 * self.num_parameters / (self.chip.teraflops * 1e9)

    def step_terms(self, tokens: float, length: int) -> list[float]:
        """Milliseconds of a step over T tokens per unit of each of the `Parameters`."""
        scale = (self.num_parameters / CLIFF_PARAMETERS) ** (2 / 3)
        return [
            self.plain_step,
            1.0,
            (length - 1) * self.drafter_share * self.plain_step,
            self.arithmetic(tokens),
            scale if tokens >= CLIFF_TOKENS else 0.0,
        ]

    def step_time(self, tokens: float, length: int, parameters: Parameters = FITTED) -> float:
        """Milliseconds of a step, only ever fitted to chips of the M1 and M2 generations."""
        return float(np.dot(self.step_terms(tokens, length), astuple(parameters)))


@dataclass(frozen=True)
class ShapeAcceptance:
    """Tokens that a draft shape of beam length L emits per step; the target verifies T."""

    length: int
    tokens: float
    tokens_per_step: float
    name: str


# Tokens per step by W and L, measured by Apple: Vicuna-7B with Apple's drafter, float16, greedy,
# 200 tokens after one prompt. Mean over the chips of Apple's sweeps (apple/ml-recurrent-drafter,
# recurrent_drafting/mlx/experiments), which verify shared prefixes once per beam.
_APPLE_TOKENS_PER_STEP = {
    (1, 2): 1.59, (1, 3): 1.82, (1, 4): 2.15, (1, 5): 2.35,
    (2, 2): 1.74, (2, 3): 2.00, (2, 4): 2.38, (2, 5): 2.52,
    (3, 2): 1.77, (3, 3): 2.15, (3, 4): 2.42, (3, 5): 2.56,
    (4, 2): 1.80, (4, 3): 2.17, (4, 4): 2.43, (4, 5): 2.56,
}  # fmt: skip
APPLE_ACCEPTANCE = tuple(
    ShapeAcceptance(length, width * length, tokens, f"w{width} l{length}")
    for (width, length), tokens in _APPLE_TOKENS_PER_STEP.items()
)


def predict(question: Question, acceptances: Sequence[ShapeAcceptance]) -> tuple[str, float]:
    """Name the shape that is predicted to be fastest, and its speed relative to plain decoding.

    Raise `ConfigError` if the cost of no shape is known.
    """
    speedups = {
        one.name: one.tokens_per_step / step * question.plain_step
        for one in acceptances
        if (step := _step_time(question, one)) is not None
    }
    if not speedups:
        raise ConfigError("no verify costs are published for trees this large; give smaller shapes")
    best = max(speedups, key=speedups.__getitem__)
    return best, speedups[best]


def assumptions(question: Question) -> list[str]:
    chip, curve = question.chip, question.curve
    sentences = [
        f"A plain step costs {question.plain_step:.1f} ms: predicted from {chip.bandwidth:.0f} "
        f"GB/s, of which decoding reaches {BANDWIDTH_SHARE:.0%}."
    ]
    if question.has_model:
        return [
            *sentences,
            "A step is predicted by a cost model fitted to Apple's sweeps of Vicuna-7B on M1 Max, "
            "M2 and M2 Ultra, measured with MLX of 2024. MLX 0.30.5 and later have other kernels "
            "for 2 to 15 tokens on these chips, probably slower; their costs are not published.",
        ]
    if curve is None:
        sentences.append(
            f"WARNING: no verify costs are published for {question.bits} bits on {chip.name} or a "
            "similar chip, so the roofline is assumed: weights are read once for all tokens, while "
            f"the GPU computes at {chip.teraflops:.1f} TFLOP/s, estimated from the cores of an M2 "
            "Max. Real kernels are slower."
        )
    elif curve in CURVES and curve.chip == chip.name:
        sentences.append(
            f"The cost of verifying, verify(T)/verify(1), was measured with {curve.source}."
        )
    else:
        sentences.append(
            f"WARNING: no verify costs are published for {question.bits} bits on {chip.name}, so "
            f"verify(T)/verify(1) is taken from the nearest chip: {curve.source}."
        )
    return [
        *sentences,
        "The costs of drafting and of the host come from the cost model for M1 and M2.",
    ]


def _step_time(question: Question, acceptance: ShapeAcceptance) -> float | None:
    """Predict the milliseconds of a step; None if no curve reaches so many tokens."""
    tokens, length = acceptance.tokens, acceptance.length
    if question.has_model:
        return question.step_time(tokens, length)
    if question.curve is None:  # the roofline: weights are read once, during the arithmetic
        ratio: float | None = max(1.0, question.arithmetic(tokens) / question.plain_step)
    else:
        ratio = question.curve.at(tokens)
    if ratio is None:
        return None
    drafting = FITTED.draft * (length - 1) * question.drafter_share
    return (ratio + drafting) * question.plain_step + FITTED.fixed

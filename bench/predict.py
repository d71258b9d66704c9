"""Prediction of drafting on a chip that is not at hand, always marked as a prediction.

Axes: W beam width, L beam length, T tokens per forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_redrafter.bench.chips import Chip, VerifyCurve, find_curve
from mlx_redrafter.bench.cost_model import Parameters, Step, step_time
from mlx_redrafter.bench.result_file import read_result
from mlx_redrafter.errors import ConfigError

# Result of `validation.fit_all` on all three of Apple's sweeps; a test checks that it still is.
FITTED = Parameters(base=1.0613, fixed=3.939, draft=1.0632, row=1.1883, cliff=37.91)
# Share of the bandwidth that plain decoding reaches: 0.72, 0.85 and 0.67 in Apple's sweeps.
BANDWIDTH_SHARE = 0.75
# Bytes per weight, scales and biases of groups of 64 included.
BYTES = {16: 2.0, 8: 1.0625, 4: 0.5625}


@dataclass(frozen=True)
class Acceptance:
    """Tokens per step of a shape.

    Attributes:
        width: Beam width, W.
        length: Beam length, L.
        tokens: Tokens verified per step, T.
        tokens_per_step: Tokens emitted per step.
        name: Name in tables.
    """

    width: int
    length: int
    tokens: float
    tokens_per_step: float
    name: str


# Vicuna-7B with Apple's drafter, float16, greedy, 200 tokens after one prompt: mean over the chips
# of Apple's sweeps (apple/ml-recurrent-drafter, recurrent_drafting/mlx/experiments), which verify
# shared prefixes once per beam.
_APPLE_TOKENS_PER_STEP = {
    (1, 2): 1.59, (1, 3): 1.82, (1, 4): 2.15, (1, 5): 2.35,
    (2, 2): 1.74, (2, 3): 2.00, (2, 4): 2.38, (2, 5): 2.52,
    (3, 2): 1.77, (3, 3): 2.15, (3, 4): 2.42, (3, 5): 2.56,
    (4, 2): 1.80, (4, 3): 2.17, (4, 4): 2.43, (4, 5): 2.56,
}  # fmt: skip
APPLE_ACCEPTANCE = tuple(
    Acceptance(width, length, width * length, tokens, f"w{width} l{length}")
    for (width, length), tokens in _APPLE_TOKENS_PER_STEP.items()
)


@dataclass(frozen=True)
class Question:
    """A pair and a chip to predict for.

    Attributes:
        chip: The chip.
        num_parameters: Parameters of the target.
        bits: Bits of the target's weights: 16, 8 or 4.
        drafter_parameters: Parameters read per level of drafting: all but embeddings.
        drafter_bits: Bits of the drafter's weights.
        plain: Measured milliseconds of a plain step; None derives them from the bandwidth.
    """

    chip: Chip
    num_parameters: float
    bits: int
    drafter_parameters: float
    drafter_bits: int = 16
    plain: float | None = None

    def __post_init__(self) -> None:
        for bits in (self.bits, self.drafter_bits):
            if bits not in BYTES:
                raise ConfigError(f"bits must be 16, 8 or 4, got {bits}")
        if self.plain is None and self.chip.bandwidth is None:
            raise ConfigError(
                f"no bandwidth known for {self.chip.name}; give the time of a plain step instead"
            )

    @property
    def plain_step(self) -> float:
        """Milliseconds of a plain step, measured or predicted."""
        if self.plain is not None:
            return self.plain
        assert self.chip.bandwidth is not None
        return (
            self.num_parameters * BYTES[self.bits] / (BANDWIDTH_SHARE * self.chip.bandwidth * 1e6)
        )

    @property
    def drafter_share(self) -> float:
        """Bytes read per level of drafting, as a share of those of a plain step."""
        read = self.drafter_parameters * BYTES[self.drafter_bits]
        return read / (self.num_parameters * BYTES[self.bits])

    @property
    def has_model(self) -> bool:
        """Whether the fitted cost model covers the chip, rather than a published curve."""
        return self.bits == 16 and self.chip.generation <= 2


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a shape.

    Attributes:
        acceptance: The shape and its tokens per step.
        step: Milliseconds per step.
        tokens_per_second: Tokens per second of decoding.
        speedup: Speed relative to plain decoding.
    """

    acceptance: Acceptance
    step: float
    tokens_per_second: float
    speedup: float


def predict(question: Question, acceptances: Sequence[Acceptance]) -> list[Prediction]:
    """Predict every shape whose cost is known, the fastest first.

    Raises:
        ConfigError: No costs are known for the target on the chip.
    """
    curve = None if question.has_model else find_curve(question.chip, question.bits)
    found = []
    for acceptance in acceptances:
        time = _step_time(question, acceptance, curve)
        if time is not None:
            speed = acceptance.tokens_per_step / time
            found.append(Prediction(acceptance, time, 1e3 * speed, speed * question.plain_step))
    if not found:
        raise ConfigError("no published verify costs for trees that large; give smaller ones")
    return sorted(found, key=lambda prediction: -prediction.speedup)


def assumptions(question: Question) -> list[str]:
    """Assumptions of the prediction, one sentence each."""
    given = (
        "measured, as you say"
        if question.plain is not None
        else (
            f"predicted from {question.chip.bandwidth:.0f} GB/s, of which decoding reaches "
            f"{BANDWIDTH_SHARE:.0%}"
        )
    )
    sentences = [f"A plain step takes {question.plain_step:.1f} ms: {given}."]
    if question.has_model:
        sentences.append(
            "A step is predicted by a cost model fitted to Apple's sweeps of Vicuna-7B on M1 Max, "
            "M2 and M2 Ultra, made with MLX of 2024. MLX from 0.30.5 on has other kernels for 2 to "
            "15 tokens on these chips, probably slower ones; nobody has published a measurement."
        )
    else:
        curve = find_curve(question.chip, question.bits)
        borrowed = "" if curve.chips[0] == question.chip.name else ", another chip"
        sentences.append(
            f"verify(T)/verify(1) is that of {curve.source}{borrowed}. Drafting and the rest are "
            "those of the model for M1 and M2."
        )
    return sentences


def read_acceptances(path: Path) -> list[Acceptance]:
    """Tokens per step of the shapes in a ``sweep.json``, those of its first dtype and temperature.

    Raises:
        CheckpointError: The file is not a sweep.
        ConfigError: The sweep is not finished.
    """
    result = read_result(path, "sweep")
    points = result.get("points", [])
    if not points:
        raise ConfigError(f"the sweep in {path} is not finished; go on with `bench sweep --resume`")
    first = points[0]["dtype"], points[0]["temp"]
    return [
        Acceptance(
            point["shape"]["beam_width"],
            point["shape"]["beam_length"],
            point["row"]["nodes_per_step"],
            point["row"]["tokens_per_step"],
            point["row"]["arm"],
        )
        for point in points
        if (point["dtype"], point["temp"]) == first and point["row"]["tokens_per_step"]
    ]


def _step_time(
    question: Question, acceptance: Acceptance, curve: VerifyCurve | None
) -> float | None:
    if curve is None:
        step = Step(
            question.chip,
            question.plain_step,
            question.num_parameters,
            question.drafter_share,
            acceptance.tokens,
            acceptance.length,
        )
        return step_time(step, FITTED)
    ratio = curve.at(acceptance.tokens)
    if ratio is None:
        return None
    drafting = FITTED.draft * (acceptance.length - 1) * question.drafter_share
    return (ratio + drafting) * question.plain_step + FITTED.fixed

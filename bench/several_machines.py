"""Speed of a model that is split over several machines, computed from published figures alone.

    pass(T) = weights / (N bandwidth USED) verify(T) / verify(1) + 2 layers (SYNC + wire(T))

Every layer adds the parts of all machines twice, and each sum waits for a fence and for the wire.

Axes: N machines, T tokens per pass, H hidden size.
"""

from dataclasses import dataclass

from mlx_redrafter.bench.chips import BYTES, UNQUANTISED, Chip, find_curve
from mlx_redrafter.bench.model_shape import ModelShape
from mlx_redrafter.checks import check_choice, check_int
from mlx_redrafter.errors import ConfigError

# Share of the bandwidth that a pass reaches, as with large models on one machine.
USED = 0.8
# Seconds of a sum's fence between CPU and GPU, Metal's default (ml-explore/mlx #4438).
SYNC = 180e-6
# Seconds of the drafts of a step by those of a plain pass on one machine: 6 ms with a 70B model.
DRAFTS = 0.066
# Tokens of a pass and tokens that a step then emits, as a drafter of fair quality reaches them.
STEPS = ((4, 2.5), (8, 4.0))
# Maximum number of machines, beyond any that MLX's users have reported.
MOST_MACHINES = 16


@dataclass(frozen=True)
class Link:
    """A link between machines: seconds of a message to the next one, and bytes per second.

    With ``is_direct`` all machines exchange at once, as with JACCL; else by the ring.
    """

    hop: float
    speed: float
    is_direct: bool

    def sum_seconds(self, machines: int, num_bytes: float) -> float:
        """Return the seconds of one sum over all machines on the wire."""
        if self.is_direct:
            return self.hop + num_bytes / self.speed
        if machines == 2:  # MLX's own sum: two hops with half of the message each
            return 2 * self.hop + num_bytes / self.speed
        return (machines - 1) * (self.hop + num_bytes / self.speed)


# Links by name: MLX's ring over Thunderbolt, and JACCL, which is RDMA over Thunderbolt 5.
LINKS = {
    "thunderbolt": Link(75e-6, 3.0e9, is_direct=False),
    "rdma": Link(15e-6, 6.3e9, is_direct=True),
}


@dataclass(frozen=True)
class SplitModel:
    """A model on N machines with the same chip; `ConfigError` if that lacks the link."""

    shape: ModelShape
    chip: Chip
    machines: int
    link: str

    def __post_init__(self) -> None:
        check_int("machines", self.machines, 1, MOST_MACHINES)
        check_choice("link", self.link, LINKS)
        name = self.chip.name
        has_thunderbolt_5 = name == "M3 Ultra" or (self.chip.generation > 3 and " " in name)
        if LINKS[self.link].is_direct and not has_thunderbolt_5:
            raise ConfigError(
                f"link rdma needs Thunderbolt 5, which {name} lacks; give --link thunderbolt"
            )

    @property
    def layers(self) -> float:
        """Number of layers, estimated: each has about 12 H^2 parameters besides the experts."""
        hidden = self.shape.hidden_size
        return max(1.0, (self.shape.active - 2 * self.shape.vocab_size * hidden) / (12 * hidden**2))

    def pass_seconds(self, tokens: int, machines: int) -> float:
        """Return the seconds of a pass over T tokens on a number of machines."""
        curve = find_curve(self.chip, self.shape.bits)
        ratio = 1.0 if curve is None else curve.at(tokens) or max(curve.ratios.values())
        weights = self.shape.active * BYTES[self.shape.bits]
        seconds = weights / (machines * self.chip.bandwidth * 1e9 * USED) * ratio
        return seconds + (self.waiting_seconds(tokens, machines) if machines > 1 else 0.0)

    def waiting_seconds(self, tokens: int, machines: int) -> float:
        """Return the seconds of a pass that its sums wait; numbers on the wire have 16 bits."""
        num_bytes = tokens * self.shape.hidden_size * BYTES[UNQUANTISED]
        wire = LINKS[self.link].sum_seconds(machines, num_bytes)
        return 2 * self.layers * (SYNC + wire)

    def speed(self, tokens: int, per_step: float, machines: int) -> float:
        drafts = DRAFTS * self.pass_seconds(1, 1)
        return per_step / (self.pass_seconds(tokens, machines) + drafts)


def describe(model: SplitModel) -> list[str]:
    count, one = model.machines, model.pass_seconds(1, 1)
    plain = model.pass_seconds(1, count)
    waiting = model.waiting_seconds(1, count)
    sentences = [
        "COMPUTED from published figures of chips, fences and links, never measured; with "
        f"{model.layers:.0f} layers, estimated from the size.",
        f"Plain: {1 / plain:.1f} tokens/s, {1e3 * plain:.0f} ms a pass, of which it waits "
        f"{1e3 * waiting:.0f} ms for sums; one such machine alone, if its memory suffices: "
        f"{1 / one:.1f} tokens/s.",
    ]
    for tokens, per_step in STEPS:
        drafted = model.speed(tokens, per_step, count)
        alone = model.speed(tokens, per_step, 1)
        sentences.append(
            f"Passes over {tokens} tokens that emit {per_step:g} a step: {drafted:.1f} tokens/s, "
            f"{drafted * plain:.2f} times plain; one machine alone {alone:.1f} tokens/s, "
            f"{alone * one:.2f} times."
        )
    if model.shape.bits >= UNQUANTISED:
        sentences.append("No costs of verifying are published for 16 bits; none are assumed.")
    best = max(1 / one, *(model.speed(*step, 1) for step in STEPS))
    if best > max(1 / plain, *(model.speed(*step, count) for step in STEPS)):
        sentences.append("Where the model fits on one machine, one alone is faster.")
    return sentences

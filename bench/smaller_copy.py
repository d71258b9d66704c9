"""A smaller copy of a model as its drafter: the predicted gain, copies at hand, and advice.

A level of drafting costs the copy's share of the model's bytes, where reading them takes the time.
"""

import shlex
from pathlib import Path

from mlx_redrafter.bench.chips import BYTES, UNQUANTISED, Chip
from mlx_redrafter.bench.cost_model import Question, ShapeAcceptance, predict
from mlx_redrafter.bench.model_shape import ModelShape, shape_of_config
from mlx_redrafter.checkpoint_files import expand_home, read_config
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, FoundDrafter
from mlx_redrafter.checks import as_mapping

# Assumed share of the tokens that a copy in so many bits chooses, too: SmolLM2-135M-Instruct's.
AGREEMENT = {4: 0.80, 8: 0.98}
# Lengths of chains of drafts, with the token before them.
LENGTHS = range(2, 6)
# Minimum predicted speedup at which a copy is offered; it takes memory, too.
WORTH_COPYING = 1.1
# Bits of the copy to make.
BITS = 4


def predict_gain(shape: ModelShape, bits: int, chip: Chip) -> float:
    """Predict the speed with a copy in 4 or 8 bits as the drafter, relative to plain decoding."""
    chance = AGREEMENT[bits]
    chains = [
        ShapeAcceptance(length, length, sum(chance**n for n in range(length)), f"w1 l{length}")
        for length in LENGTHS
    ]
    copy = shape.active * BYTES[bits] / BYTES[UNQUANTISED]
    return predict(Question(chip, shape.active, shape.bits, copy), chains)[1]


def find_copy(search: DrafterSearch, chip: Chip | None) -> FoundDrafter | None:
    """Find the copy on this machine that gains most on a chip; None if none is known to pay."""
    if chip is None:
        return None
    gains: list[tuple[float, FoundDrafter]] = []
    for found in search.copies():
        bits = as_mapping(read_config(Path(found.path)).get("quantization")).get("bits")
        if isinstance(bits, int) and bits in AGREEMENT:
            gain = predict_gain(shape_of_config(found.name, search.model.config), bits, chip)
            reason = f"{found.reason} in {bits} bits; {_describe(gain, chip)}"
            gains.append((gain, found._replace(reason=reason)))
    gain, best = max(gains, key=lambda one: one[0], default=(0.0, None))
    return best if gain >= WORTH_COPYING else None


def advise_copy(model: str, shape: ModelShape, chip: Chip | None) -> list[str]:
    """Say how to make a copy that drafts for the model, or that none would pay."""
    if chip is None:
        return ["No figures are known for this machine; --chip 'M2 Pro' predicts the gain there."]
    if shape.bits <= BITS:
        return [f"It would not pay: the model is stored in {shape.bits} bits itself."]
    if shape.bits < UNQUANTISED:
        return ["mlx-lm makes a smaller copy of an unquantised model only; give that one."]
    gain = predict_gain(shape, BITS, chip)
    if gain < WORTH_COPYING:
        return [f"It would not pay: {_describe(gain, chip)}."]
    copy = model.rstrip("/") if expand_home(model).is_dir() else model.rpartition("/")[2]
    made = shlex.quote(f"{copy}-{BITS}bit")
    convert = f"python -m mlx_lm convert --hf-path {shlex.quote(model)} --mlx-path {made}"
    return [
        f"Make a copy in {BITS} bits: {convert} -q --q-bits {BITS}",
        f"Then give --drafter {made}: {_describe(gain, chip)}, if it chooses "
        f"{AGREEMENT[BITS]:.0%} of the model's tokens.",
    ]


def _describe(gain: float, chip: Chip) -> str:
    return f"predicted {gain:.2f} times as fast as plain decoding on {chip.name}"

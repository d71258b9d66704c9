"""Table of the computed time of training a drafter, by model and chip, for the documentation."""

from __future__ import annotations

from mlx_redrafter.bench.chips import CHIPS
from mlx_redrafter.bench.model_shape import ModelShape, shape_of_family
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.training.duration import format_time

# Tokens of the training runs in the table.
TABLE_TOKENS = 10**6
# Models of the table, a row each for every number of bits.
TABLE_MODELS = ("llama 1B", "qwen3 4B", "llama 8B")
# Bits of the weights.
TABLE_BITS = (4, 16)
# Chips of the table, a column each.
TABLE_CHIPS = ("M1", "M1 Max", "M2", "M2 Max", "M3", "M3 Max", "M4", "M4 Max")


def render_table() -> str:
    """Make the table of training on a million tokens, as Markdown."""
    head = ["model", "bits", "drafter", "cache", "memory", *TABLE_CHIPS]
    rows = [
        _row(shape_of_family(f"{name} {bits}bit")) for name in TABLE_MODELS for bits in TABLE_BITS
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(shape: ModelShape) -> list[str]:
    cost = TrainingCost.of(shape, TABLE_TOKENS)
    needed = cost.needed
    sizes = (needed.drafter, needed.cache, needed.memory)
    times = [format_time(cost.predict(shape, CHIPS[chip]).total) for chip in TABLE_CHIPS]
    return [shape.name, str(shape.bits), *map(format_bytes, sizes), *times]

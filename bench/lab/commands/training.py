"""Print the computed cost of training on a million tokens, by model and chip, as Markdown."""

from argparse import ArgumentParser, Namespace

import typer

from mlx_redrafter.bench.chips import CHIPS
from mlx_redrafter.bench.model_shape import ModelShape
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.training.duration import format_time

# Tokens of the training runs in the table.
TABLE_TOKENS = 10**6
# Models of the table, a row each for every number of bits: their billions of parameters, of those
# that a token reads, hidden sizes, vocabularies, and numbers in the keys and values of a token. A
# token reads one row of an embedding that is not the head as well.
TABLE_MODELS = {
    "llama 1B": (1.24, 1.24, 2048, 128256, 2 * 16 * 8 * 64),
    "qwen3 4B": (4.02, 4.02, 2560, 151936, 2 * 36 * 8 * 128),
    "llama 8B": (8.03, 7.5, 4096, 128256, 2 * 32 * 8 * 128),
}
# Size of a number in the keys and values of a token, in bytes.
NUMBER_BYTES = 2
# Bits of the weights.
TABLE_BITS = (4, 16)
# Chips of the table, a column each.
TABLE_CHIPS = ("M1", "M1 Max", "M2", "M2 Max", "M3", "M3 Max", "M4", "M4 Max")


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def run(arguments: Namespace) -> None:
    head = ["model", "bits", "drafter", "cache", "memory", *TABLE_CHIPS]
    rows = [_row(shape_of(name, bits)) for name in TABLE_MODELS for bits in TABLE_BITS]
    lines = [head, ["---"] * len(head), *rows]
    typer.echo("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def shape_of(name: str, bits: int) -> ModelShape:
    """Return the sizes of a model of the table."""
    billions, read, hidden_size, vocab_size, numbers = TABLE_MODELS[name]
    cache = NUMBER_BYTES * numbers
    return ModelShape(name, billions * 1e9, read * 1e9, bits, hidden_size, vocab_size, cache)


def _row(shape: ModelShape) -> list[str]:
    cost = TrainingCost.of(shape, TABLE_TOKENS)
    needed = cost.needed
    sizes = (needed.drafter, needed.cache, needed.memory)
    times = [format_time(cost.predict(shape, CHIPS[chip]).total) for chip in TABLE_CHIPS]
    return [shape.name, str(shape.bits), *map(format_bytes, sizes), *times]

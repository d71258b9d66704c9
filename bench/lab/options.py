"""Options that several commands of the laboratory share, and how they are read."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.result_file import pair_names
from mlx_redrafter.cli.bench_output import parse_shapes
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.redrafter.network import Drafter

PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, and the old man who lived by the sea said to his daughter:"
)


def at_least(low: int) -> Callable[[str], int]:
    """Return a parser of integers from ``low`` up."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}")
        return number

    return parse


def add_pair(parser: ArgumentParser) -> None:
    """Add the options of a target and its drafter."""
    parser.add_argument("--model", help="folder or repository of the target; default: bundled")
    parser.add_argument("--drafter", help="folder or repository of the drafter, lookup or mtp")


def load_recurrent_pair(arguments: Namespace) -> tuple[Any, Any, Drafter]:
    """Load the target, its tokenizer and a recurrent drafter.

    Raises:
        ConfigError: No drafter is given for the model, or the drafter is of another kind.
    """
    if arguments.model is not None and arguments.drafter is None:
        raise ConfigError("expected a drafter for the model, got none; add --drafter FOLDER")
    model, tokenizer, drafter = Pair(arguments.model, arguments.drafter).load()
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"expected a recurrent drafter, got {drafter!r}; name another folder")
    return model, tokenizer, drafter


def describe_pair(arguments: Namespace, drafter: Any) -> dict[str, Any]:
    """Describe the pair for a result; ``drafter`` is the loaded one."""
    pair = Pair(arguments.model, arguments.drafter)
    return pair_names(pair.model, pair.drafter_name, drafter)


def add_shape(parser: ArgumentParser, default: str | None = "4x5x9") -> None:
    """Add the draft shape of every step."""
    parser.add_argument("--shape", default=default, help="WIDTHxLENGTHxNODES; default: %(default)s")


def read_plan(arguments: Namespace) -> DraftPlan:
    """Read the plan of every step.

    Raises:
        ConfigError: The shape cannot be read, a size is out of range, or there are several shapes.
    """
    plans = parse_shapes(arguments.shape)
    if len(plans) != 1:
        raise ConfigError(f"expected one draft shape, got {arguments.shape!r}")
    return plans[0]


def add_out(parser: ArgumentParser) -> None:
    """Add the option of the result's path."""
    parser.add_argument("-o", "--out", type=Path, help="JSON file for the result")

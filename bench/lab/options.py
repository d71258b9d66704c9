"""Options that several commands of the laboratory share."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


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


def add_out(parser: ArgumentParser) -> None:
    """Add the option of the result's path."""
    parser.add_argument("-o", "--out", type=Path, help="JSON file for the result")

"""Entry of the laboratory: ``python -m mlx_redrafter.bench.lab NAME [options]``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import typer

from mlx_redrafter.errors import ConfigError, RedrafterError

PROGRAM = "python -m mlx_redrafter.bench.lab"
NAMES = sorted(path.stem for path in (Path(__file__).parent / "commands").glob("[!_]*.py"))


def make_parser(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Import a command of the laboratory and make the parser of its options."""
    command = import_module(f"mlx_redrafter.bench.lab.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=command.__doc__)
    command.add_options(parser)
    return command, parser


def call(arguments: Sequence[str]) -> None:
    """Parse the arguments and run one command of the laboratory."""
    parser = argparse.ArgumentParser(prog=PROGRAM, usage=f"{PROGRAM} NAME [options]")
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    command, options = make_parser(parser.parse_args(arguments[:1]).name)
    command.run(options.parse_args(arguments[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command of the laboratory and return its exit code."""
    try:
        call(arguments)
    except (RedrafterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except typer.Exit as end:
        return end.exit_code
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(sys.argv[1:]))

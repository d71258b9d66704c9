"""Options of the grammar that a text is held to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.errors import ConfigError, explain

if TYPE_CHECKING:
    from mlx_redrafter.grammar import Grammar

PANEL = "Grammar"


@dataclass(frozen=True)
class Held:
    """What the text must be; at most one of them."""

    json_schema: Annotated[
        Path | None,
        typer.Option(help="File of a JSON schema that the text must fit.", rich_help_panel=PANEL),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            help="Regular expression that the whole text must match.", rich_help_panel=PANEL
        ),
    ] = None
    lark: Annotated[
        Path | None,
        typer.Option(
            help="File of a grammar in the form of Lark that the text must fit.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def read(self) -> Grammar | None:
        """The grammar, None where there is none.

        Raises:
            ConfigError: Several are given, or the one is none.
        """
        from mlx_redrafter.grammar import Grammar

        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names} cannot be combined; give one")
        for name, value in given.items():
            text = _read_file(value) if isinstance(value, Path) else value
            return getattr(Grammar, name)(text)  # its class methods have these names
        return None


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text: {error}") from error

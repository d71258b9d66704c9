"""Results of `bench speed` as Markdown: the tables, and a page to publish."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mlx_redrafter.bench.report import Row, tabulate
from mlx_redrafter.bench.runs import AUTO, PLAIN
from mlx_redrafter.errors import DataError
from mlx_redrafter.memory_sizes import format_bytes

# Line below the tables.
EXPLANATION = (
    "tokens/s: of a whole batch, from its first token to its last, the median of all batches. "
    "`plain` and `auto` run in one process, without and with drafts. With a temperature above 0, "
    "a server that draws other random numbers writes other texts."
)


def speed_tables(rows: Sequence[Row], baseline: str = PLAIN) -> list[str]:
    """Make the tables of all prompts, and of the default by category; return the lines."""
    tables = [_table(tabulate([row for row in rows if not row.category], baseline))]
    drafted = [row for row in rows if row.category and row.arm == AUTO]
    if drafted:
        tables.append(_table(tabulate(drafted, baseline)))
    return "\n\n".join([*tables, EXPLANATION]).splitlines()


def page(result: Mapping[str, Any]) -> str:
    """Make a page of a result: machine, versions, conditions and tables.

    The page names nobody: of paths it has the last part, and of servers their names in the table.
    Raise `DataError` if the result is not finished or damaged.
    """
    try:
        machine, settings = result["machine"], result["configuration"]
        memory = machine["memory_bytes"]
        quiet = "unknown, as servers worked beside" if settings["servers"] else "yes"
        facts = {
            "model": _public(settings["model"]),
            "drafter": _public(settings["drafter"]),
            "machine": f"{machine['processor']}, {machine['cores']} cores"
            + ("" if memory is None else f", {format_bytes(memory)}"),
            "system": f"{machine['system']}, {machine['device']}",
            "versions": ", ".join(f"{name} {one}" for name, one in result["versions"].items()),
            "commit": result["commit"] or "of a package",
            "measured": result["measured_at"][:10],
            "prompts": f"{len(settings['prompts'])} of {_public(settings['prompt_file'])}",
            "texts": f"{settings['repeats']} x {settings['max_tokens']} tokens of every prompt",
            "idle machine": "; ".join(result["disturbances"]) or quiet,
        }
        tables = "\n".join(result["tables"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"expected a finished result of bench speed, found no {error}; finish it with --resume"
        ) from error
    lines = [f"# {facts['model']} on {facts['machine']}", "", _table([("", ""), *facts.items()])]
    found = "\n".join(lines) + f"\n\n{tables}\n"
    home = str(Path.home())
    if len(home) > 1 and home in found:  # some containers have "/" for a home
        raise DataError("the page would have your home folder in it; rename the model's folder")
    return found


def is_page(path: Path) -> bool:
    return path.is_file() and EXPLANATION in path.read_text(encoding="utf-8", errors="replace")


def _public(name: str) -> str:
    is_path = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name[:1] in "~."
    return PureWindowsPath(name).name if is_path else name


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Write lines as Markdown, the first with the columns' names."""
    columns, *rows = lines
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")

"""Results of `bench speed` as Markdown: the tables, and a page to publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mlx_redrafter.bench.runs import AUTO, PLAIN
from mlx_redrafter.bench.speed import SpeedRow
from mlx_redrafter.errors import DataError
from mlx_redrafter.memory_sizes import format_bytes

# Columns of the table by category.
CATEGORY_COLUMNS = ("setting", "category", "times plain", "tokens/step", "texts")
# Line below the tables.
EXPLANATION = (
    "tokens/s: of a whole batch, from its first token to its last, the median of all batches. "
    "`plain` and `auto` run in one process, without and with drafts. With a temperature above 0, "
    "a server that draws other random numbers writes other texts."
)


def columns(baseline: str = PLAIN) -> list[str]:
    """Name the columns of the table of all prompts."""
    return [
        "setting", "method", "tokens/s", f"times {baseline}", "interval", "tokens/step",
        "acceptance by position", "texts", "equal texts",
    ]  # fmt: skip


def cells(row: SpeedRow) -> list[str]:
    """Format a row of all prompts, for `columns`."""
    rates = " ".join(f"{rate:.0%}" for rate in row.acceptance_rate_by_position)
    return [
        row.setting,
        row.method,
        "" if row.tokens_per_second is None else f"{row.tokens_per_second.median:.1f}",
        "" if row.speedup is None else f"{row.speedup.median:.2f}",
        "" if row.speedup is None else row.speedup.span(),
        "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
        rates,
        str(row.num_texts),
        "" if row.num_different is None else str(row.num_texts - row.num_different),
    ]


def _category_cells(row: SpeedRow) -> list[str]:
    setting, _, _, speedup, _, tokens_per_step, _, num_texts, _ = cells(row)
    return [setting, row.category, speedup, tokens_per_step, num_texts]


def speed_tables(rows: Sequence[SpeedRow], baseline: str = PLAIN) -> list[str]:
    """Make the tables of all prompts, and of the default by category; return the lines."""
    tables = [_table(columns(baseline), (cells(row) for row in rows if not row.category))]
    drafted = [row for row in rows if row.category and row.method == AUTO]
    if drafted:
        tables.append(_table(CATEGORY_COLUMNS, map(_category_cells, drafted)))
    return "\n\n".join([*tables, EXPLANATION]).splitlines()


def page(result: Mapping[str, Any]) -> str:
    """Make a page of a result: machine, versions, conditions and tables.

    The page names nobody: of paths it has the last part, and of servers their names in the table.

    Raises:
        DataError: The result is not finished or damaged.
    """
    try:
        machine, settings = result["machine"], result["configuration"]
        memory = machine["memory_bytes"]
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
            "idle machine": _idleness(result["disturbances"], settings["servers"]),
        }
        tables = "\n".join(result["tables"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"expected a finished result of bench speed, found no {error}; finish it with --resume"
        ) from error
    lines = [f"# {facts['model']} on {facts['machine']}", "", _table(("", ""), facts.items())]
    found = "\n".join(lines) + f"\n\n{tables}\n"
    if str(Path.home()) in found:
        raise DataError("the page would have your home folder in it; rename the model's folder")
    return found


def _idleness(disturbances: Sequence[str], servers: Sequence[str]) -> str:
    return "; ".join(disturbances) or ("unknown, as servers worked beside" if servers else "yes")


def _public(name: str) -> str:
    """Return the last part of a path, and the whole name of a repository."""
    is_path = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name[:1] in "~."
    return PureWindowsPath(name).name if is_path else name


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")

"""Rows of results from runs: speed, acceptance, equality of the texts; tables, and a page of them.

The page, of `bench speed`, is Markdown to publish.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mlx_redrafter.bench.runs import AUTO, PLAIN, STOCK, STOCK_DRAFT, TimedRun, repetition
from mlx_redrafter.bench.timing import MedianEstimate, estimate
from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.errors import DataError
from mlx_redrafter.memory_sizes import format_bytes

# Columns of a table of rows; the speedup's names the baseline.
COLUMNS = (
    "setting", "category", "method", "tokens/s", "times {}", "interval", "tokens/step",
    "nodes/step", "acceptance by position", "repeated 4-grams", "prompt speedup", "texts",
    "different",
)  # fmt: skip

# Line below the tables of `bench speed`.
EXPLANATION = (
    "tokens/s: of a whole batch, from its first token to its last, the median of all batches. "
    "`plain` and `auto` run in one process, without and with drafts. With a temperature above 0, "
    "a server that draws other random numbers writes other texts."
)
# Number of positions whose acceptance rate a table has room for; files have all.
SHOWN_POSITIONS = 5


@dataclass(frozen=True)
class Row:
    """Results of one decoding method over some prompts.

    Attributes:
        speedup: Speed relative to the baseline, one ratio per prompt or batch and repeat, or None.
        tokens_per_second: Speed of decoding, of a batch from its first token to its last; beside
            mlx-lm's batches, from the beginning of its prompts.
        prompt_speedup: Speed relative to stock mlx-lm until the first token.
        tokens_per_step: Tokens per step and text over all steps; None if no steps are known.
        acceptance_rate_by_depth: Share of steps that accepted at least d drafts, at index d - 1.
        repeated: Share of 4-grams that had occurred earlier in their text.
        num_different: Number of texts that differ from the reference's; None if they may.
        setting: Conditions of the runs; empty if all rows have the same.
        category: Category of the prompts; empty for all.
    """

    arm: str
    speedup: MedianEstimate | None
    tokens_per_second: MedianEstimate | None
    prompt_speedup: MedianEstimate | None
    tokens_per_step: float | None
    acceptance_rate_by_depth: list[float]
    nodes_per_step: float | None
    repeated: float
    num_texts: int
    num_different: int | None = None
    setting: str = ""
    batch_size: int = 1
    category: str = ""


def num_different(rows: Iterable[Row]) -> int:
    """Count the texts that should equal the reference's and do not."""
    return sum(row.num_different or 0 for row in rows)


def summarise(runs: Sequence[TimedRun], temp: float = 0.0, max_repeated: float = 1.0) -> list[Row]:
    """Make one row per decoding method, in the order of their first runs, of one group.

    The reference's texts are right: stock mlx-lm's at temperature 0, if it has decoded them, else
    those of this package's plain decoding, as mlx-lm draws other random numbers. Texts with a
    larger share of repeated 4-grams than ``max_repeated`` do not count.
    """
    reference = STOCK if temp == 0 and any(run.arm == STOCK for run in runs) else PLAIN
    texts = {run.prompt: run.tokens for run in runs if run.arm == reference}
    counted = [run for run in runs if repetition(run.tokens) <= max_repeated]
    stock = {run.turn: run for run in counted if run.arm == STOCK and run.is_timed}
    rows = []
    for name in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == name and run.prompt in texts]
        different = sum(run.tokens != texts[run.prompt] for run in own)
        is_checked = own and (reference == STOCK or name not in (STOCK, STOCK_DRAFT))
        row = _row(name, [run for run in counted if run.arm == name], stock)
        rows.append(replace(row, num_different=different if is_checked else None))
    return rows


def _row(
    name: str, runs: Sequence[TimedRun], stock: dict[tuple[str, int, str, int], TimedRun]
) -> Row:
    timed = [run for run in runs if run.is_timed]
    pairs = [(stock[run.turn], run) for run in timed if run.turn in stock]
    counts = zip_longest(*(run.accepted_counts for run in runs), fillvalue=0)
    stats = DecodingStats(accepted_counts=list(map(sum, counts)))
    steps, verified = stats.steps, sum(run.num_verified for run in runs)
    return Row(
        arm=name,
        speedup=ratios((b.prompt, a.seconds_per_token, b.seconds_per_token) for a, b in pairs),
        tokens_per_second=ratios((run.prompt, 1.0, run.seconds_per_token) for run in timed),
        prompt_speedup=ratios((b.prompt, a.prompt_seconds, b.prompt_seconds) for a, b in pairs),
        tokens_per_step=sum(len(run.tokens) - 1 for run in runs) / steps if steps else None,
        acceptance_rate_by_depth=stats.acceptance_rate_by_depth,
        nodes_per_step=verified / steps if steps and verified else None,
        repeated=sum(repetition(run.tokens) for run in runs) / max(1, len(runs)),
        num_texts=len(runs),
    )


def ratios(pairs: Iterable[tuple[Hashable, float, float]]) -> MedianEstimate | None:
    """Estimate the median of the quotients of pairs, each with its text; None without pairs."""
    samples = [(text, a / b) for text, a, b in pairs]
    return estimate([one for _, one in samples], [text for text, _ in samples]) if samples else None


def divide(runs: Sequence[TimedRun]) -> dict[str, list[TimedRun]]:
    """Divide runs by the category of their prompts, if there are several; "" has all."""
    categories = dict.fromkeys(run.category for run in runs)
    parts = {one: [run for run in runs if run.category == one] for one in categories}
    return {"": list(runs), **(parts if len(parts) > 1 else {})}


def tabulate(rows: Sequence[Row], baseline: str = STOCK) -> list[list[str]]:
    """Format rows as lines, the first with the columns' names; empty columns are left out."""
    lines = [[name.format(baseline) for name in COLUMNS], *map(_cells, rows)]
    has_values = [any(values) for _, *values in zip(*lines, strict=True)]
    return [list(compress(line, has_values)) for line in lines]


def _cells(row: Row) -> list[str]:
    return [
        row.setting,
        row.category,
        row.arm,
        _format(row.tokens_per_second, 1),
        _format(row.speedup),
        "" if row.speedup is None else row.speedup.span(),
        "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
        "" if row.nodes_per_step is None else f"{row.nodes_per_step:.1f}",
        " ".join(f"{rate:.0%}" for rate in row.acceptance_rate_by_depth[:SHOWN_POSITIONS]),
        f"{row.repeated:.0%}",
        _format(row.prompt_speedup),
        str(row.num_texts),
        "" if row.num_different is None else str(row.num_different),
    ]


def _format(value: MedianEstimate | None, digits: int = 2) -> str:
    return "" if value is None else f"{value.median:.{digits}f}"


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
        # A sitting without one has no runs, as when a finished result is resumed.
        loads = [one["load_of_others"] for one in result["sittings"] if "load_of_others" in one]
        quiet = "unknown, as the runs were too short to tell" if None in loads else "yes"
        quiet = "unknown, as servers worked beside" if settings["servers"] else quiet
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
    """Return whether a file is a page, with nothing before it or after it."""
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    )
    return lines[2:3] == _table([("", "")]).splitlines()[:1] and lines[-1] == EXPLANATION


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

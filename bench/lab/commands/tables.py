"""Regenerate the tables of the results pages; drop from the result files what no table reads."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlx_redrafter.bench.result_file import write_result
from mlx_redrafter.checkpoint_files import write_text
from mlx_redrafter.errors import CheckpointError

FOLDER = Path(__file__).parents[2] / "results"
NAMES = ("batches.md", "machines.md")
PAGES = (FOLDER.parent / "README.md", *(FOLDER / name for name in NAMES))
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

# A result by its path in the folder of results, without suffix.
Results = Mapping[str, Mapping[str, Any]]
Lines = Iterable[Sequence[str]]


def fill(page: str, results: Results) -> str:
    """Regenerate the tables between the markers of a page.

    Args:
        page: Markdown with ``<!-- table: NAME -->`` and ``<!-- end -->`` around each table.
        results: The results.

    Raises:
        CheckpointError: A marker names no table.
    """

    def replace(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise CheckpointError(
                f"expected a table of {', '.join(TABLES)} in the page, found {name!r}"
            )
        columns, lines = TABLES[name]
        rows = [columns, ["---"] * len(columns), *lines(results)]
        return found[1] + "".join(f"| {' | '.join(row)} |\n" for row in rows) + found[3]

    return TABLE.sub(replace, page)


def read_results(folder: Path) -> Results:
    """Read all results in a folder and its subfolders, in the order of their paths."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): json.loads(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(folder.rglob("*.json"))
    }


# Batch sizes, a column each.
BATCH_SIZES = (1, 2, 4, 8, 16)


def _batches(results: Results) -> Lines:
    """Yield a row per method of batch generation, with a cell for each batch size."""
    for name, result in _of_kind(results, "throughput"):
        methods: dict[str, dict[int, str]] = {}
        for one in result["rows"]:
            speed = f"{_median(one['tokens_per_second'], '.0f')} ({_median(one['speedup'])})"
            methods.setdefault(one.get("arm") or one["method"], {})[one["batch_size"]] = speed
        for method, cells in methods.items():
            columns = (cells.get(size, "") for size in BATCH_SIZES)
            yield name, _code(result), _temp(result), method, *columns, _quiet(result)


def _machine_texts(results: Results) -> Lines:
    """Yield a row per kind or family, with a cell of the checks that failed for each number."""
    for name, result in _of_kind(results, "machine texts"):
        cells: dict[tuple[str, str], dict[int, str]] = {}
        tokens: Counter[tuple[str, str]] = Counter()
        for row in result["rows"]:
            failed = ", ".join(check for check, is_equal in row["checks"].items() if not is_equal)
            key = row["what"], row["dtype"]
            cells.setdefault(key, {})[row["ranks"]] = f"not {failed}" if failed else "equal"
            tokens[key] += row["tokens"]
        for key, by_ranks in cells.items():
            columns = (by_ranks.get(size, "") for size in NUMBERS_OF_RANKS)
            yield name, _code(result), *key, *columns, f"{tokens[key]:,}"


def _prediction(results: Results) -> Lines:
    for _, result in _of_kind(results, "predict validation"):
        for one in result["found"]:
            errors = one["errors"]
            yield (
                one["chip"], str(len(errors)), f"{median(map(abs, errors)):.1%}",
                f"{median(errors):+.1%}", f"{max(errors, key=abs):+.1%}",
                f"{min(best['share'] for best in one['best']):.1%}",
            )  # fmt: skip


# Numbers of ranks, a column each.
NUMBERS_OF_RANKS = (2, 3, 4)


def _columns(names: str) -> list[str]:
    return names.split(" | ")


TABLES: Mapping[str, tuple[Sequence[str], Callable[[Results], Lines]]] = {
    "throughput": (
        [
            *_columns("file | git commit | temperature | method"),
            *map(str, BATCH_SIZES),
            "idle machine",
        ],
        _batches,
    ),
    "machine_texts": (
        [
            *_columns("file | git commit | what | dtype"),
            *(f"{size} ranks" for size in NUMBERS_OF_RANKS),
            "tokens",
        ],
        _machine_texts,
    ),
    "prediction": (
        _columns("left out | steps | median error | signed | largest | its best shape has"),
        _prediction,
    ),
}


def _of_kind(results: Results, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, result) for name, result in results.items() if result["kind"] == kind)


def _code(result: Mapping[str, Any]) -> str:
    """Name the measured commit, or the day if the commit is not known."""
    return str(result["commit"] or "")[:7] or str(result["measured_at"])[:10]


def _quiet(result: Mapping[str, Any]) -> str:
    """Say whether the machine was idle."""
    return "no" if result["disturbances"] else "yes"


def _temp(result: Mapping[str, Any]) -> str:
    return f"{result['configuration']['temp']:g}"


def _median(value: Mapping[str, Any], form: str = ".2f") -> str:
    return f"{value['median']:{form}}"


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def run(arguments: Namespace) -> None:
    for path in sorted(FOLDER.rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if (reduced := without_raw_numbers(result)) != result:
            write_result(path, reduced)
    results = read_results(FOLDER)
    for page in PAGES:
        write_text(page, fill(page.read_text(encoding="utf-8"), results))


def without_raw_numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a result without its runs, windows and samples."""
    kept = {name: value for name, value in result.items() if name not in ("runs", "windows")}
    if isinstance(found := kept.get("found"), dict):
        kept["found"] = {name: value for name, value in found.items() if name != "samples"}
    return kept

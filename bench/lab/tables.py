"""Tables of the results pages, generated from the result files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlx_redrafter.bench.disturbance import find_disturbances
from mlx_redrafter.bench.lab.pooled_heads import pool
from mlx_redrafter.bench.result_file import write_result
from mlx_redrafter.bench.runs import AUTO, PLAIN, TimedRun
from mlx_redrafter.bench.timing import MedianEstimate
from mlx_redrafter.checkpoint_files import write_text
from mlx_redrafter.errors import CheckpointError

FOLDER = Path(__file__).parents[1] / "results"
NAMES = ("parts.md", "batches.md", "default.md", "heads.md", "machines.md")
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


def _speed(results: Results) -> Lines:
    for name, result in _of_kind(results, "compare"):
        rows = result.get("rows") or result["found"]["rows"]
        auto = _find(rows, AUTO)
        yield (
            name, _code(result), _temp(result), str(auto["num_texts"]),
            *(_median(_find(rows, arm)["speedup"]) for arm in (PLAIN, "beam", "top_n", AUTO)),
            _span(auto["speedup"]), f"{auto['tokens_per_step']:.2f}", f"{auto['repeated']:.0%}",
            _quiet(result),
        )  # fmt: skip


def _regret(results: Results) -> Lines:
    for name, result in _of_kind(results, "regret"):
        found = result["found"]
        auto, best = (_find(found["rows"], arm) for arm in (AUTO, found["best"]))
        yield (
            name, _code(result), _temp(result), str(auto["num_texts"]), _median(auto["speedup"]),
            _median(best["speedup"]), found["best"], _median(found["ratio"]), _span(found["ratio"]),
            _quiet(result),
        )  # fmt: skip


def _guard(results: Results) -> Lines:
    for name, result in _of_kind(results, "guard"):
        for found in result["found"]:
            yield (
                name, _code(result), found["case"], _median(found["decode"], ".3f"),
                _span(found["decode"], ".3f"), f"{found['worst']:.3f}",
                f"{found['tokens_per_step']:.2f}", f"{found['plain_share']:.0%}",
            )  # fmt: skip


def _sweeps(results: Results) -> Lines:
    for name, result in _of_kind(results, "sweep"):
        shapes: dict[str, list[Any]] = {}
        for point in result["points"]:
            shapes.setdefault(point["shape"]["select"], []).append(point["row"])
        for rows in shapes.values():
            if len(rows) > len(CHAIN_AND_TREE) and name.endswith("sweep"):
                best = max(rows, key=lambda row: row["speedup"]["median"])
                yield (
                    name, _code(result), str(len(rows)), best["arm"], _median(best["speedup"]),
                    _span(best["speedup"]), f"{best['tokens_per_step']:.2f}", _quiet(result),
                )  # fmt: skip


# Beam widths of the chain and the tree that acceptance is measured with.
CHAIN_AND_TREE = (1, 4)


def _acceptance(results: Results) -> Lines:
    for name, result in _of_kind(results, "sweep"):
        if "acceptance" in name:
            for temp, rows in _by_temp(result).items():
                yield (
                    name, _code(result), f"{temp:g}", str(rows[0]["num_texts"]),
                    *(f"{row['tokens_per_step']:.2f}" for row in rows),
                    *(" ".join(f"{a:.0%}" for a in r["acceptance_rate_by_depth"]) for r in rows),
                )  # fmt: skip


def _noise(results: Results) -> Lines:
    for name, result in _of_kind(results, "sweep"):
        without = results.get(f"{name}-without")
        if without is not None:
            for temp, rows in _by_temp(result).items():
                if temp > 0:  # greedy decoding has no noise
                    pairs = (rows, _by_temp(without)[temp])
                    rates = (f"{row['tokens_per_step']:.2f}" for pair in pairs for row in pair)
                    yield name, _code(result), f"{temp:g}", *rates


def _overhead(results: Results) -> Lines:
    for name, result in _of_kind(results, "overhead"):
        found, settings = result["found"], result["configuration"]
        parts = {part: _estimate(value) for part, value in found["parts"].items()}
        names = ("stock step", "step", "verify", "draft", "accept", "commit")
        share = _estimate(result["share"])
        shape = (settings["beam_width"], settings["beam_length"], settings["tree_nodes"])
        yield (
            name, _code(result), " ".join(f"{a} {n}" for a, n in zip("WLN", shape, strict=True)),
            *(f"{1e3 * parts[part].median:.1f}" for part in names),
            f"{share.median:.1%}", share.span(".1%"),
        )  # fmt: skip


def _bounds(results: Results) -> Lines:
    for kind in ("memory", "endurance"):
        for name, result in _of_kind(results, kind):
            for found in result["findings"]:
                number, bound = (f"{found[key]:.4g}" for key in ("found", "bound"))
                yield name, _code(result), found["name"], f"{number} {found['unit']}", bound


def _caches(results: Results) -> Lines:
    for name, result in _of_kind(results, "caches"):
        for found in result["found"]:
            one, *others = found["seconds"]
            yield (
                name, _code(result), found["model"], f"{found['context']:,}",
                f"{1e3 * found['seconds'][one]['median']:.1f}",
                str(result["configuration"]["tree_nodes"]),
                *(f"{found['ratios'][other]:.2f}" for other in others),
                f"{found['peak'] / 1e6:.1f}", _quiet(result),
            )  # fmt: skip


def _heads(results: Results) -> Lines:
    folders: dict[str, list[Mapping[str, Any]]] = {}
    for name, result in _of_kind(results, "heads"):
        folders.setdefault(name.rpartition("/")[0], []).append(result)
    for folder, found in folders.items():
        for one in pool(found):
            group = one.group
            tokens = "" if group.trained_tokens is None else f"{group.trained_tokens / 1e6:g}M"
            drafting = "" if one.drafting is None else f"{one.drafting.mean:.2f}"
            spreads = (one.chain_tokens, one.chain_speed, one.default_tokens, one.default_speed)
            yield (
                folder, group.model, group.kind, tokens, f"{group.temp:g}",
                str(one.num_seeds), f"{one.bytes / 1e6:.1f}",
                drafting, *("" if spread is None else spread.text() for spread in spreads),
                "yes" if all(_quiet(result) == "yes" for result in found) else "no",
            )  # fmt: skip


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
    "speed": (
        _columns(
            "file | git commit | temperature | texts | plain | merged beams | best nodes | auto | "
            "interval | tokens/step | repeated 4-grams | idle machine"
        ),
        _speed,
    ),
    "regret": (
        _columns(
            "file | git commit | temperature | texts | auto | best fixed | its shape | "
            "auto / best | interval | idle machine"
        ),
        _regret,
    ),
    "guard": (
        _columns(
            "file | git commit | case | mlx-lm's time / auto's | interval | worst pair | "
            "tokens/step | plain steps"
        ),
        _guard,
    ),
    "sweeps": (
        _columns(
            "file | git commit | shapes | fastest | speed | interval | tokens/step | idle machine"
        ),
        _sweeps,
    ),
    "acceptance": (
        _columns(
            "file | git commit | temperature | texts | chain | tree | chain, by position | "
            "tree, by position"
        ),
        _acceptance,
    ),
    "noise": (
        _columns("file | git commit | temperature | chain | tree | chain, without | tree, without"),
        _noise,
    ),
    "overhead": (
        _columns(
            "file | git commit | shape | mlx-lm's step | step | verify | draft | accept | commit | "
            "overhead | interval"
        ),
        _overhead,
    ),
    "bounds": (_columns("file | git commit | measurement | found | bound"), _bounds),
    "caches": (
        _columns(
            "file | git commit | layers keep | context | one token, ms | tokens per pass | "
            "mlx-lm's call | chain | tree | peak, MB | idle machine"
        ),
        _caches,
    ),
    "heads": (
        _columns(
            "folder | model | drafter | trained on | temperature | seeds | MB | drafting a chain | "
            "chain: tokens/step | speed | default: tokens/step | speed | idle machine"
        ),
        _heads,
    ),
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


def _by_temp(result: Mapping[str, Any]) -> dict[float, list[Any]]:
    """Group the rows of the chain and the tree by temperature."""
    rows: dict[float, list[Any]] = {}
    for width in CHAIN_AND_TREE:
        for point in result["points"]:
            if point["shape"]["beam_width"] == width:
                rows.setdefault(point["temp"], []).append(point["row"])
    return rows


def _find(rows: Sequence[Mapping[str, Any]], arm: str) -> Mapping[str, Any]:
    """Find the row of the first method whose name begins with ``arm``."""
    return next(row for row in rows if row["arm"].startswith(arm))


def _code(result: Mapping[str, Any]) -> str:
    """Name the measured commit, or the day if the commit is not known."""
    return str(result["commit"] or "")[:7] or str(result["measured_at"])[:10]


def _quiet(result: Mapping[str, Any]) -> str:
    """Say whether the machine was idle."""
    return "no" if result["disturbances"] else "yes"


def _temp(result: Mapping[str, Any]) -> str:
    return f"{result['configuration']['temp']:g}"


def _estimate(value: Mapping[str, Any]) -> MedianEstimate:
    return MedianEstimate(**{**value, "quartiles": tuple(value["quartiles"])})


def _median(value: Mapping[str, Any], form: str = ".2f") -> str:
    return f"{value['median']:{form}}"


def _span(value: Mapping[str, Any], form: str = ".2f") -> str:
    return _estimate(value).span(form)


def reduce_results() -> None:
    """Drop from all result files the raw numbers that no table reads."""
    for path in sorted(FOLDER.rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if (reduced := without_raw_numbers(result)) != result:
            write_result(path, reduced)


def without_raw_numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a result without its runs, windows and samples.

    The runs of files older than the check for disturbances are checked first.
    """
    kept = {name: value for name, value in result.items() if name not in ("runs", "windows")}
    if "runs" in result and "disturbances" not in result:
        runs = [TimedRun(**run) for run in result["runs"]]
        kept["disturbances"] = find_disturbances(None, runs)
    if isinstance(found := kept.get("found"), dict):
        kept["found"] = {name: value for name, value in found.items() if name != "samples"}
    return kept


def write_pages() -> None:
    """Regenerate the tables of all pages."""
    results = read_results(FOLDER)
    for page in PAGES:
        text = fill(page.read_text(encoding="utf-8"), results)
        write_text(page, text)

"""Tables on the pages of results, made of the result files.

``python -m mlx_redrafter.bench.tables`` in a checkout writes them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mlx_redrafter.bench.disturbance import find_disturbances
from mlx_redrafter.bench.pooled_heads import pool
from mlx_redrafter.bench.runs import AUTO, PLAIN, Run
from mlx_redrafter.bench.timing import Estimate
from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.errors import CheckpointError

FOLDER = Path(__file__).parent / "results"
PAGES = (
    FOLDER.parent / "README.md",
    *(FOLDER / name for name in ("README.md", "batches.md", "default.md", "heads.md")),
)
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

# A result by its path in the folder of results, without suffix.
Results = Mapping[str, Mapping[str, Any]]
Lines = Iterable[Sequence[str]]


def fill(page: str, results: Results) -> str:
    """A page with the tables between its markers made again.

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
    """All results in a folder and those below it, in the order of their paths."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): json.loads(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(folder.rglob("*.json"))
    }


def _speed(results: Results) -> Lines:
    for name, result in _of_kind(results, "compare"):
        rows = result["found"]["rows"]
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


# Widths of the two shapes that acceptance is measured with.
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


# Texts at once, a column each.
BATCH_SIZES = (1, 2, 4, 8, 16)


def _batches(cell: Callable[[Mapping[str, Any]], str], results: Results) -> Lines:
    """Ways of decoding several texts at once, with a cell for each number of texts."""
    for name, result in _of_kind(results, "throughput"):
        ways: dict[str, dict[int, str]] = {}
        for one in result["found"]:
            ways.setdefault(one["way"], {})[one["batch_size"]] = cell(one)
        for way, cells in ways.items():
            columns = (cells.get(size, "") for size in BATCH_SIZES)
            yield name, _code(result), _temp(result), way, *columns, _quiet(result)


def _throughput(one: Mapping[str, Any]) -> str:
    return f"{_median(one['throughput'], '.0f')} ({_median(one['speedup'])})"


def _latency(one: Mapping[str, Any]) -> str:
    return f"{1e3 * one['latency']['median']:.1f}"


def _prediction(results: Results) -> Lines:
    for _, result in _of_kind(results, "predict validation"):
        for one in result["found"]:
            errors = one["errors"]
            yield (
                one["chip"], str(len(errors)), f"{median(map(abs, errors)):.1%}",
                f"{median(errors):+.1%}", f"{max(errors, key=abs):+.1%}",
                f"{min(best['share'] for best in one['best']):.1%}",
            )  # fmt: skip


TABLES: Mapping[str, tuple[Sequence[str], Callable[[Results], Lines]]] = {
    "speed": (
        ("file", "code", "T", "texts", "plain", "merged beams", "best nodes", "auto", "interval",
         "tokens/step", "repeated", "quiet"), _speed,
    ),
    "regret": (
        ("file", "code", "T", "texts", "auto", "best fixed", "its shape", "auto / best", "interval",
         "quiet"), _regret,
    ),
    "guard": (
        ("file", "code", "case", "mlx-lm's time / auto's", "interval", "worst pair", "tokens/step",
         "plain steps"), _guard,
    ),
    "sweeps": (
        ("file", "code", "shapes", "fastest", "speed", "interval", "tokens/step", "quiet"), _sweeps,
    ),
    "acceptance": (
        ("file", "code", "T", "texts", "chain", "tree", "chain, by depth", "tree, by depth"),
        _acceptance,
    ),
    "noise": (
        ("file", "code", "T", "chain", "tree", "chain without", "tree without"), _noise,
    ),
    "overhead": (
        ("file", "code", "shape", "mlx-lm's step", "step", "verify", "draft", "accept", "commit",
         "overhead", "interval"), _overhead,
    ),
    "bounds": (("file", "code", "what", "found", "bound"), _bounds),
    "caches": (
        ("file", "code", "layers keep", "tokens before", "one token, ms", "N", "mlx-lm's call",
         "chain", "tree", "peak, MB", "quiet"), _caches,
    ),
    "heads": (
        ("folder", "model", "drafter", "trained on", "T", "seeds", "MB", "drafting",
         "chain: tokens/step", "speed", "default: tokens/step", "speed", "quiet"), _heads,
    ),
    "throughput": (
        ("file", "code", "T", "way", *map(str, BATCH_SIZES), "quiet"),
        partial(_batches, _throughput),
    ),
    "latency": (
        ("file", "code", "T", "way", *map(str, BATCH_SIZES), "quiet"), partial(_batches, _latency),
    ),
    "prediction": (
        ("left out", "steps", "median error", "signed", "largest", "its best shape has"),
        _prediction,
    ),
}  # fmt: skip


def _of_kind(results: Results, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, result) for name, result in results.items() if result["kind"] == kind)


def _by_temp(result: Mapping[str, Any]) -> dict[float, list[Any]]:
    """Rows of the chain and the tree by temperature."""
    rows: dict[float, list[Any]] = {}
    for width in CHAIN_AND_TREE:
        for point in result["points"]:
            if point["shape"]["beam_width"] == width:
                rows.setdefault(point["temp"], []).append(point["row"])
    return rows


def _find(rows: Sequence[Mapping[str, Any]], arm: str) -> Mapping[str, Any]:
    """The row of a way of decoding, whose name begins so."""
    return next(row for row in rows if row["arm"].startswith(arm))


def _code(result: Mapping[str, Any]) -> str:
    """The commit that was measured, or the day where that is not known."""
    return str(result["commit"] or "")[:7] or str(result["measured_at"])[:10]


def _quiet(result: Mapping[str, Any]) -> str:
    """Whether nothing disturbed the times; what files before that check say is found out now."""
    found = result.get("disturbances")
    if found is None:
        found = find_disturbances(None, [Run(**run) for run in result["runs"]])
    return "no" if found else "yes"


def _temp(result: Mapping[str, Any]) -> str:
    return f"{result['configuration']['temp']:g}"


def _estimate(value: Mapping[str, Any]) -> Estimate:
    return Estimate(**{**value, "quartiles": tuple(value["quartiles"])})


def _median(value: Mapping[str, Any], form: str = ".2f") -> str:
    return f"{value['median']:{form}}"


def _span(value: Mapping[str, Any], form: str = ".2f") -> str:
    return _estimate(value).span(form)


def write_pages() -> None:
    """Make the tables of all pages again."""
    results = read_results(FOLDER)
    for page in PAGES:
        text = fill(page.read_text(encoding="utf-8"), results)
        write_atomically(page, partial(Path.write_text, data=text, encoding="utf-8"))


if __name__ == "__main__":
    write_pages()

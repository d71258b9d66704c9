"""Imports go one way: a module imports only what stands below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.models import ROOT

PACKAGE = "mlx_redrafter"

# From the bottom to the top; the names of packages stand for everything in them.
ORDER = [
    "version",
    "errors",
    "wording",
    "config",
    "grammar",
    "backend",
    "host",
    "checkpoint",
    "bundled",
    "topk",
    "tree",
    "forest",
    "target",
    "kernels",
    "decoding",
    "proposers",
    "policy",
    "chat",
    "shared_passes",
    "memory",
    "responses",
    "batch_stream",
    "claims",
    "engine",
    "conversation",
    "generation",
    "recognition",
    "loading",
    "parity",
    "training",
    "convert",
    "bench",
    "server",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, name in enumerate(ORDER)}
# The folders that stand inside the package once it is installed.
FOLDERS = {
    PACKAGE: ROOT / PACKAGE,
    **{f"{PACKAGE}.{name}": ROOT / name for name in ("convert", "bench", "server", "cli")},
}
# Scripts that train and measure the bundled pair; they do not ship.
NOT_SHIPPED = ("pair", "results")


def _sources() -> dict[str, Path]:
    """Source files by dotted module name."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if not set(parts) & set(NOT_SHIPPED):
                name = ".".join((package, *parts)).removesuffix(".__init__")
                sources[name] = path
    return sources


SOURCES = _sources()


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every module of this package that a source imports, in functions and type checks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                above = len(parents) - node.level + is_package
                base = ".".join(filter(None, [*parents[:above], base]))
            if _is_own(base):
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    yield whole if whole in SOURCES else base


def _is_own(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def _area(module: str) -> str:
    """The name in `ORDER` that a module stands under, empty for the package itself."""
    return module.removeprefix(PACKAGE).strip(".").partition(".")[0]


def test_every_module_has_a_rank() -> None:
    areas = {_area(module) for module in SOURCES} - {""}
    assert areas <= RANK.keys()


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_go_down(module: str) -> None:
    path = SOURCES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if module == PACKAGE:  # the facade: it may name everything, and loads almost nothing
        return
    here = _area(module)
    for imported in _imports(tree, module, path.name == "__init__.py"):
        there = _area(imported)
        if imported != PACKAGE and there != here:
            assert RANK[there] < RANK[here], f"{module} imports {imported}"


@pytest.mark.parametrize("area", ["training", "convert", "bench", "server", "cli"])
def test_no_module_of_a_folder_imports_itself_in_a_circle(area: str) -> None:
    edges = {
        module: {
            imported
            for imported in _imports(
                ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"
            )
            if _area(imported) == area and imported != module
        }
        for module, path in SOURCES.items()
        if _area(module) == area
    }
    package = f"{PACKAGE}.{area}"  # importing a sibling runs the package first; that is no circle
    done: set[str] = {package}
    while True:
        ready = {module for module in edges if edges[module] <= done} - done
        if not ready:
            break
        done |= ready
    assert set(edges) <= done, f"a circle among {sorted(set(edges) - done)}"


def test_the_facade_loads_the_back_end_only() -> None:
    tree = ast.parse(SOURCES[PACKAGE].read_text(encoding="utf-8"))
    at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = {node.module for node in at_import if isinstance(node, ast.ImportFrom)}
    assert {name for name in own if name and _is_own(name)} == {
        f"{PACKAGE}.backend",
        f"{PACKAGE}.version",
    }


def test_the_checker_notices_an_import_that_goes_up() -> None:
    tree = ast.parse("def f():\n    from .cli import main\n")
    assert list(_imports(tree, f"{PACKAGE}.topk", False)) == [f"{PACKAGE}.cli.main"]
    assert RANK["cli"] > RANK["topk"]


# Array code and counts that stand on MLX alone.
WITHOUT_MLX_LM = (
    "config",
    "tree",
    "forest",
    "topk",
    "decoding/accept",
    "decoding/stats",
    "decoding/records",
    "proposers/expansion",
    "proposers/search",
    "proposers/suffix_index",
    "proposers/redrafter/beam",
    "proposers/redrafter/network",
)


@pytest.mark.parametrize("module", WITHOUT_MLX_LM)
def test_the_core_does_not_know_mlx_lm(module: str) -> None:
    tree = ast.parse((ROOT / PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("mlx_lm") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("mlx_lm")


def _reachable(area: str) -> set[str]:
    """Areas that the modules of an area import, and those import, and so on."""
    found, waiting = set(), [module for module in SOURCES if _area(module) == area]
    while waiting:
        module = waiting.pop()
        path = SOURCES[module]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for imported in _imports(tree, module, path.name == "__init__.py"):
            if imported in SOURCES and imported not in found:
                found.add(imported)
                waiting.append(imported)
    return {_area(module) for module in found} - {area, ""}


def test_decoding_knows_no_proposer_and_no_policy() -> None:
    assert _reachable("decoding") <= {"config", "errors", "host", "tree", "forest", "target"}


def test_trees_stand_on_the_ground() -> None:
    assert _reachable("tree") == {"host"}


MOST_LINES, MOST_BODY_LINES = 400, 50


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_files_and_functions_are_short(module: str) -> None:
    source = SOURCES[module].read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= MOST_BODY_LINES, node.name


def test_a_step_fits_on_a_screen() -> None:
    source = SOURCES[f"{PACKAGE}.decoding.text"].read_text(encoding="utf-8")
    (step,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    )
    assert (step.end_lineno or 0) - step.lineno + 1 <= MOST_BODY_LINES

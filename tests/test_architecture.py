"""Imports go one way: a module imports only from its own room and from the floors below it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers.models import ROOT

PACKAGE = "mlx_redrafter"
# The folders that stand inside the package once it is installed.
FOLDERS = {
    PACKAGE: ROOT / PACKAGE,
    **{f"{PACKAGE}.{name}": ROOT / name for name in ("convert", "bench", "server", "cli")},
}
# The laboratory and its results do not ship.
NOT_SHIPPED = ("lab", "pair", "results")


class Source(NamedTuple):
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def _sources() -> dict[str, Source]:
    """Shipped files by dotted module name, each parsed once."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if not set(parts) & set(NOT_SHIPPED):
                name = ".".join((package, *parts)).removesuffix(".__init__")
                text = path.read_text(encoding="utf-8")
                sources[name] = Source(path, text, ast.parse(text))
    return sources


SOURCES = _sources()


def read_floors(docstring: str) -> dict[str, int]:
    """Floor of every room, from lines such as ``  3  target  kernels`` of a docstring."""
    floors = {}
    for line in docstring.splitlines():
        if match := re.fullmatch(r" +(\d+) ((?: +\w+)+)", line):
            floors |= dict.fromkeys(match[2].split(), int(match[1]))
    return floors


FLOORS = read_floors(ast.get_docstring(SOURCES[PACKAGE].tree) or "")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that a source imports, in functions and type checks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import names its module in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else str(node.module)


def _is_own(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def _place(module: str) -> str:
    """The folder or single file that a module stands in, empty for the package itself."""
    return module.removeprefix(PACKAGE).strip(".").partition(".")[0]


def _room(module: str) -> str:
    """The same, with the files of floor 1 as one room."""
    place = _place(module)
    return "ground" if FLOORS.get(place) == 1 else place


@cache
def _edges() -> dict[str, set[str]]:
    """Modules of this package that each module imports."""
    return {
        module: set(filter(_is_own, imports_of(source.tree))) - {module, PACKAGE}
        for module, source in SOURCES.items()
    }


def test_every_room_has_a_floor_and_every_floor_a_room():
    assert {_place(module) for module in SOURCES} - {"", "__main__"} == FLOORS.keys()
    assert sorted(set(FLOORS.values())) == list(range(1, max(FLOORS.values()) + 1))


def test_imports_go_down():
    # The package itself is the facade: it may name everything, and loads almost nothing.
    offenders = [
        f"{module} imports {imported}"
        for module, imports in _edges().items()
        for imported in imports
        if module not in (PACKAGE, f"{PACKAGE}.__main__") and _room(imported) != _room(module)
        if FLOORS[_place(imported)] >= FLOORS[_place(module)]
    ]
    assert offenders == []


def test_classes_of_the_core_are_small():
    """At most 14 attributes and 22 methods; objects of decoding write to nobody else's."""
    for module, source in SOURCES.items():
        room = _room(module)
        if room not in ("decoding", "engine", "policy", "target", "trees"):
            continue
        assert room != "decoding" or _written(source.tree) == _own(source.tree), module
        for one in ast.walk(source.tree):
            if isinstance(one, ast.ClassDef):
                fields = [node for node in one.body if isinstance(node, ast.AnnAssign)]
                methods = [node for node in one.body if isinstance(node, ast.FunctionDef)]
                assert len(_own(one)) + len(fields) <= 14, one.name
                assert len(methods) <= 22, one.name


def _written(tree: ast.AST) -> set[str]:
    """Return the attributes that a source assigns to, such as ``self.status``."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {ast.unparse(node) for node in attributes if isinstance(node.ctx, ast.Store)}


def _own(tree: ast.AST) -> set[str]:
    return {name for name in _written(tree) if re.fullmatch(r"self\.\w+", name)}


def test_no_shipped_module_imports_the_laboratory():
    offenders = [
        name
        for name, source in SOURCES.items()
        if f"{PACKAGE}.bench.lab" in source.text.replace(" import lab", ".lab")
    ]
    assert offenders == []


def test_no_room_imports_itself_in_a_circle():
    packages = {name for name, source in SOURCES.items() if source.is_package}
    edges = {
        module: {one for one in imports if _room(one) == _room(module)} - packages
        for module, imports in _edges().items()
    }
    done: set[str] = packages - {PACKAGE}
    while ready := {module for module in edges if edges[module] <= done} - done:
        done |= ready
    assert set(edges) - done == set()


def test_the_facade_loads_the_back_end_only():
    at_import = [node for node in SOURCES[PACKAGE].tree.body if isinstance(node, ast.ImportFrom)]
    own = {node.module for node in at_import if node.module and _is_own(node.module)}
    assert own == {f"{PACKAGE}.backend", f"{PACKAGE}.version"}


# Array code and counts that stand on MLX alone.
WITHOUT_MLX_LM = (
    "draft_plan", "generation_options", "trees/tree",
    "decoding/delivery", "decoding/passes",
    "proposers/search", "proposers/lookup/chances", "proposers/lookup/contexts",
    "proposers/redrafter/network",
)  # fmt: skip


def test_the_core_does_not_know_mlx_lm():
    offenders = [
        f"{module}: {name}"
        for module in WITHOUT_MLX_LM
        for name in imports_of(SOURCES[f"{PACKAGE}.{module.replace('/', '.')}"].tree)
        if name.startswith("mlx_lm")
    ]
    assert offenders == []


# The phases of a step, in order; each fits on a screen, its docstring left out.
PHASES, SCREEN = ["request", "draft", "read", "select", "verify", "commit"], 25


def _method(module: str, name: str) -> ast.FunctionDef:
    """The method of that name in the only class that has one."""
    nodes = ast.walk(SOURCES[f"{PACKAGE}.{module}"].tree)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    (found,) = [
        one
        for owner in classes
        for one in owner.body
        if isinstance(one, ast.FunctionDef) and one.name == name
    ]
    return found


def _body_lines(function: ast.FunctionDef) -> int:
    body = function.body[bool(ast.get_docstring(function)) :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _phases(function: ast.FunctionDef) -> list[str]:
    """The phases that a function calls, or hands to another one, in the order of its lines."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [node.attr.removeprefix("_") for node in found]
    return [name for name in names if name in PHASES]


def test_a_step_is_draft_verify_commit_alone_and_in_a_batch():
    whole = _method("decoding.step", "run")
    assert _phases(whole) == PHASES
    phases = [_method("decoding.step", f"_{name}") for name in PHASES if name != "verify"]
    phases += [_method(f"decoding.{lane}", "verify") for lane in ("step", "batch")]
    sizes = {one.name: _body_lines(one) for one in [whole, *phases]}
    assert {name: size for name, size in sizes.items() if size > SCREEN} == {}


def test_constants_are_no_pending_operations():
    """An array of a module must hold its value, as another thread cannot run the operation."""
    pending = [
        f"{name}: {ast.unparse(node)}"
        for name, source in SOURCES.items()
        for node in source.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func).startswith("mx.")
        if ast.unparse(node.value.func) not in ("mx.array", "mx.new_thread_local_stream")
    ]
    assert pending == []

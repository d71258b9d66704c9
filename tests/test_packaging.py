"""The wheel holds the five folders' sources, the pair, page, licence and typing marker only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_redrafter import __version__
from tests.helpers.models import ROOT

FOLDERS = {
    "mlx_redrafter": "mlx_redrafter",
    "cli": "mlx_redrafter/cli",
    "convert": "mlx_redrafter/convert",
    "bench": "mlx_redrafter/bench",
    "server": "mlx_redrafter/server",
}
PAIR = ROOT / "mlx_redrafter" / "pair"
OTHERS = {
    "mlx_redrafter/py.typed",
    "mlx_redrafter/server/page.html",
    "mlx_redrafter/checkpoints/drafters.tsv",
}
LARGEST_PAIR = 25 * 10**6
NOT_SHIPPED = {"bench/lab", "bench/pair", "bench/results"}
COPIED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", *FOLDERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy so that the checkout stays clean."""
    pytest.importorskip("build", reason="the wheel is built with the package build")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _sources() -> set[str]:
    """What the sources of the five folders are called in the wheel."""
    shipped = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT)
            if not any(str(relative).startswith(f"{name}/") for name in NOT_SHIPPED):
                inner = Path(package) / path.relative_to(ROOT / folder)
                shipped.add(inner.as_posix())
    return shipped


def _pair() -> set[str]:
    """What the files of the bundled pair are called in the wheel, if the checkout has them."""
    return {path.relative_to(ROOT).as_posix() for path in PAIR.rglob("*") if path.is_file()}


def test_every_source_ships(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if name.endswith(".py")}
    assert shipped == _sources()


def test_nothing_else_stands_at_the_top(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"mlx_redrafter", f"mlx_redrafter-{__version__}.dist-info"}
    others = {name for name in wheel.namelist() if name.startswith("mlx_redrafter/")} - _sources()
    assert others == OTHERS | _pair()


def test_the_pair_is_small(wheel: zipfile.ZipFile) -> None:
    found = sum(wheel.getinfo(name).file_size for name in _pair())
    assert found <= LARGEST_PAIR


def test_the_licence_is_in_it(wheel: zipfile.ZipFile) -> None:
    name = f"mlx_redrafter-{__version__}.dist-info/licenses/LICENSE"
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"mlx_redrafter-{__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert not any(line.startswith("torch") for line in required)
    # The back end on Linux; on a Mac the extra is empty.
    assert [line for line in required if line.startswith("mlx[")] == ["mlx[cpu]>=0.32.4"]
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "redrafter-mlx = mlx_redrafter.cli.main:run" in entry_points

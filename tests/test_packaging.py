"""The wheel holds the five folders' sources, the pair, page, licence and typing marker only.

The source archive is whole, and the page of the package index has no dead link.
"""

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_redrafter import __version__
from tests.helpers.cli import python
from tests.helpers.models import ROOT
from tests.test_architecture import SOURCES

PAGE = (
    "page.html", "page.js", "marked.umd.js", "purify.min.js", "marked.LICENSE", "purify.LICENSE",
)  # fmt: skip
WEIGHTS = [ROOT / "mlx_redrafter" / name for name in ("pair", "drafters")]
OTHERS = {
    "mlx_redrafter/py.typed", *(f"mlx_redrafter/server/page/{name}" for name in PAGE),
    "mlx_redrafter/checkpoints/drafters.tsv",
}  # fmt: skip
LARGEST_WHEEL = 25 * 10**6
# Repository that the links on the package index lead to.
REPOSITORY = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of source archive and wheel, built from a copy: the checkout stays clean."""
    pytest.importorskip("build", reason="the wheel is built with the package build")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    variables = {**os.environ, "REPOSITORY_URL": REPOSITORY}
    built = python("-m", "build", "--outdir", folder, source, env=variables)
    assert built.returncode == 0, built.stderr[-2000:]
    assert "absent from" not in built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _sources() -> set[str]:
    """What the sources of the five folders are called in the wheel."""
    return {
        f"{module.replace('.', '/')}{'/__init__' if source.is_package else ''}.py"
        for module, source in SOURCES.items()
    }


def _weights() -> set[str]:
    """What the files of the bundled weights are called in the wheel, if the checkout has them."""
    files = (path for folder in WEIGHTS for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_every_source_ships_and_nothing_else(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"mlx_redrafter", f"mlx_redrafter-{__version__}.dist-info"}
    shipped = {name for name in wheel.namelist() if name.startswith("mlx_redrafter/")}
    assert shipped == _sources() | OTHERS | _weights()


def test_the_weights_are_small_and_the_licences_in_it(wheel):
    assert sum(file.compress_size for file in wheel.infolist()) <= LARGEST_WHEEL
    for name in ("LICENSE", "server/page/marked.LICENSE", "server/page/purify.LICENSE"):
        found = wheel.read(f"mlx_redrafter-{__version__}.dist-info/licenses/{name}")
        assert found == (ROOT / name).read_bytes()


def test_metadata(wheel):
    info = f"mlx_redrafter-{__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nAuthor: " in metadata
    for name in ("Repository", "Documentation", "Changelog", "Issues"):
        assert f"\nProject-URL: {name}, {REPOSITORY}/" in metadata
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


def test_links_of_the_index_page_are_absolute(wheel):
    page = wheel.read(f"mlx_redrafter-{__version__}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if "://" not in link] == []
    prefix = f"{REPOSITORY}/blob/v{__version__}/"
    own = [link.removeprefix(prefix) for link in links if link.startswith(prefix)]
    assert [link for link in own if not (ROOT / link.partition("#")[0]).exists()] == []
    assert f"]({REPOSITORY}/raw/v{__version__}/docs/step.svg)" in page


def test_the_source_archive_holds_what_the_tests_import(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("bench", "cli", "convert", "docs", "mlx_redrafter", "release", "server"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert files <= names, folder
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert tests | {"CHANGELOG.md", "CONTRIBUTING.md", "uv.lock", ".ci/tests"} <= names
    assert not any(name.endswith(".pyc") for name in names)


@pytest.mark.parametrize(
    ("module", "argument"), [("mlx_redrafter", "--version"), ("mlx_redrafter.bench.lab", "--help")]
)
def test_a_checkout_runs_without_an_editable_install(module, argument):
    """As after README's install, whose package the folder here hides."""
    code = (
        "import runpy, sys\n"
        "sys.meta_path = [one for one in sys.meta_path if 'editable' not in repr(one).lower()]\n"
        f"sys.argv = ['program', {argument!r}]\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    found = python("-c", code, cwd=ROOT)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout

"""The README says what is so, and a release has its notes, its formula, and its lock."""

import re
import tomllib
from pathlib import Path

import pytest

from mlx_redrafter import __version__
from release.formula import FORMULAS, PYTHON, write_formula
from release.notes import find_notes, read_version
from tests.helpers.models import ROOT, supported_names
from tests.test_prose import PAGES

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
# A page that a new user reads to its end.
MOST_LINES = 120


def test_the_list_of_supported_models_is_complete():
    rows = re.findall(r"^\| [A-Z] \| (.+) \|$", MODELS, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", " ".join(rows)) == supported_names()
    assert f"**Your model.** {len(supported_names())} model types" in README


def test_the_python_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least} or newer" in README


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


CARDS = sorted((ROOT / "mlx_redrafter").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_can_be_reached_from_the_readme():
    found, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        links = re.findall(r"\]\(([^):#]+)[)#]", page.read_text(encoding="utf-8"))
        left += [page.parent / link for link in links]
    assert {page.resolve() for page in PAGES} <= found


CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- A thing.

## [0.1.0] - 2026-11-01
"""
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
ARCHIVE = b"a source archive"


def test_notes_are_the_section_of_the_version():
    assert find_notes(CHANGELOG, "0.2.0") == "### Added\n\n- A thing."
    for version in ("0.1.0", "0.2.1", "Unreleased"):  # empty, absent, without a date
        with pytest.raises(ValueError, match=f"expected a section .*{version}"):
            find_notes(CHANGELOG, version)
    assert read_version() == __version__


def test_the_lock_is_that_of_the_project():
    """`uv lock` must follow each change of the dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (own,) = (one for one in LOCK["package"] if one["name"] == "mlx-redrafter")
    locked = {
        (one["name"], one.get("specifier", ""), one.get("marker", ""))
        for one in own["metadata"]["requires-dist"]
    }
    declared = set()
    for extra, lines in {"": project["dependencies"], **extras}.items():
        for line in lines:
            name, specifier = re.fullmatch(r"([a-z-]+)(?:\[.*\])?(.*)", line).groups()  # type: ignore[union-attr]
            bounds = ",".join(sorted(specifier.split(","), reverse=True))
            declared.add((name, bounds, f"extra == '{extra}'" if extra else ""))
    in_order = {
        (name, ",".join(sorted(bounds.split(","), reverse=True)), marker)
        for name, bounds, marker in locked
    }
    assert in_order == declared


def test_the_formula_follows_the_rules_of_brew_audit():
    formula = write_formula(LOCK, "mlx_redrafter-1.2.3.tar.gz", ARCHIVE)
    lines = formula.splitlines()
    assert max(map(len, (one for one in lines if "url" not in one))) <= 118
    (description,) = re.findall(r'^  desc "(.*)"$', formula, re.MULTILINE)
    assert len(f"mlx-redrafter: {description}") <= 80
    assert not re.match(r"(A|An|The|Mlx|mlx)\b|.*\.$", description)
    order = "desc homepage url sha256 license depends_on resource def test".split()
    found = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)]
    firsts = list(dict.fromkeys(word for word in found if word in order))
    assert firsts == order
    resources = re.findall(
        r'  resource "(.+)" do\n    url "https://files\.pythonhosted\.org/.+\.tar\.gz"\n'
        r'    sha256 "[0-9a-f]{64}"\n  end\n',
        formula,
    )
    assert resources == sorted(resources)
    assert len(resources) == formula.count("  resource ")
    assert {"mlx-lm", "transformers", "typer", "hf-xet", "starlette"} <= set(resources)
    strangers = {"mlx-cpu", "mlx-metal", "mlx-redrafter", "torch", "colorama", "pytest"}
    assert not {*strangers, *FORMULAS} & set(resources)
    depends = re.findall(r'^  depends_on [":]([^"\n]+?)"?$', formula, re.MULTILINE)
    assert depends == sorted(depends)
    assert "macos" in depends, "among the names, as `brew style` wants it"
    assert {*FORMULAS.values(), PYTHON} <= set(depends)


def test_the_address_of_an_archive_is_that_of_pypi():
    """PyPI's folders are named by BLAKE2, as those of the lock's archives are."""
    formula = write_formula(LOCK, "a.tar.gz", b"")
    folder = "0e/57/51c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    assert f'url "https://files.pythonhosted.org/packages/{folder}/a.tar.gz"' in formula


def test_a_package_without_a_source_archive_is_an_error():
    packages = [
        {key: value for key, value in one.items() if key != "sdist" or one["name"] != "rich"}
        for one in LOCK["package"]
    ]
    with pytest.raises(ValueError, match="source archive of rich"):
        write_formula({"package": packages}, "a.tar.gz", ARCHIVE)

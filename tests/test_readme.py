"""The README says what is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers.models import ROOT, supported_names

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
# A page that a new user reads to its end.
MOST_LINES = 120


def test_the_list_of_supported_models_is_complete() -> None:
    rows = re.findall(r"^\| [A-Z] \| (.+) \|$", MODELS, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", " ".join(rows)) == supported_names()
    assert f"**Your model.** {len(supported_names())} model types" in README


def test_the_python_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least} or newer" in README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "bench").rglob("*.md"),
    *(ROOT / "mlx_redrafter").rglob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        links = re.findall(r"\]\(([^):#]+)[)#]", page.read_text(encoding="utf-8"))
        left += [page.parent / link for link in links]
    assert {page.resolve() for page in PAGES if not {"pair", "drafters"} & {*page.parts}} <= found

"""The README says what is so."""

from __future__ import annotations

import re
import tomllib

from tests.helpers.models import ROOT, supported_names

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
# A page that a new user reads to its end.
MOST_LINES = 120


def test_the_list_of_supported_models_is_complete() -> None:
    (line,) = (line for line in MODELS.splitlines() if line.startswith("Any model that mlx-lm"))
    _, _, names = line.partition("quantised or not: ")
    assert re.findall(r"`([^`]+)`", names) == supported_names()
    assert f"**Your model.** {len(supported_names())} model types" in README


def test_the_python_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least} or newer" in README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "bench" / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).is_file(), f"{page.name}: {link}"

"""Shipped sources and pages have no forbidden openings, words, lengths or dead quotations."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.helpers.models import ROOT
from tests.helpers.prose import in_page, in_source
from tests.test_architecture import PACKAGE, SOURCES

PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bench").rglob("*.md")),
]  # fmt: skip
# Files of other projects that pages name.
FOREIGN = ("convert_checkpoint.py",)
# Files that pages quote by a path, or the end of one.
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in (PACKAGE, "bench", "cli", "convert", "server", "tests", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
]


def _dead_quotations(text: str) -> Iterator[str]:
    """Quoted files, lines of files and modules that do not exist."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for quotation in quoted:
        named = re.fullmatch(r"([\w./-]+\.(?:py|md|h|metal))(?::(\d+))?", quotation)
        if named and named[1] not in FOREIGN:
            found = [one for one in FILES if f"/{one}".endswith(f"/{named[1]}")]
            if not any(_has_line(one, int(named[2] or 1)) for one in found):
                yield quotation
    for module in re.findall(r"python -m ([\w.]+)", text):
        if find_spec(module) is None:
            yield f"python -m {module}"


def _has_line(name: str, number: int) -> bool:
    return number <= len((ROOT / name).read_text(encoding="utf-8").splitlines())


def test_sources_follow_the_rules():
    offences = [
        str(offence)
        for module, source in SOURCES.items()
        for offence in in_source(module, source.text)
    ]
    assert offences == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_follow_the_rules(page):
    text = page.read_text(encoding="utf-8")
    assert [*map(str, in_page(page.name, text)), *_dead_quotations(text)] == []


def test_dead_quotations_are_found():
    dead = "`test_prose.py:9999`, `cli/no_such.py`, python -m tests.no_such"
    found = ["test_prose.py:9999", "cli/no_such.py", "python -m tests.no_such"]
    assert list(_dead_quotations(dead)) == found


def test_offences_in_a_source_are_found():
    source = '''
class Point:
    """What it is.

    Attributes:
        step: Of the run, which
            On this line continues.
        name: Name of the point.

    Example:
        x: At no time checked.
    """
    def read(self, *names):
        """The names.

        Args:
            *names: Where they are.

        Returns:
            As the one before. The second
            By this line.
        """

# Most of them.
FEW, MANY = 1, 2
option(help="Least of them.")
'''
    assert [(one.rule, one.words) for one in in_source("", source)] == [
        ("opening of a summary", "What it is."),
        ("opening of a description", "step: Of the run, which"),
        ("a function's summary begins with a verb", "The names."),
        ("opening of a description", "*names: Where they are."),
        ("opening of a description", "As the one before. The second"),
        ("opening of a help", "Least of them."),
        ("opening of a comment", "Most of them."),
        ("one comment for several constants", "Most of them."),
    ]


def test_offences_in_words_are_found():
    long = " ".join(["word"] * 35)
    page = f"It takes in all.\n\n{long}.\n\n```\n{long}\n```\n\n| {long} |\n"
    assert [one.rule for one in in_page("", page)] == [
        "house words 'takes in'",
        "a sentence of 35 words or more",
    ]

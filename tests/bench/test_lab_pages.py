"""The pages quote commands of the laboratory that exist, and list all of them."""

from __future__ import annotations

import re
import shlex

import pytest

from mlx_redrafter.bench.lab.__main__ import NAMES, PROGRAM, make_parser
from tests.helpers.models import ROOT

LAB = ROOT / "bench" / "lab" / "README.md"
PAGES = [
    *(ROOT / "bench").rglob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "README.md",
]


def _commands(text: str) -> list[list[str]]:
    """Quoted commands of the laboratory as words, the program left out."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(rf"^(?: {{4}})?{PROGRAM} (.*)$", joined, re.MULTILINE)
    lines += [" ".join(one.split()) for one in re.findall(rf"`{PROGRAM} ([^`]+)`", joined)]
    return [shlex.split(line.replace("...", ""), comments=True) for line in lines]


def test_quoted_commands_exist() -> None:
    quoted = [words for page in PAGES for words in _commands(page.read_text(encoding="utf-8"))]
    quoted += [
        shlex.split(row.replace("...", ""))
        for row in re.findall(r"^\| `([^`]+)`", LAB.read_text(encoding="utf-8"), re.MULTILINE)
        if "options" not in row
    ]
    assert len(quoted) > len(NAMES)
    offenders = []
    for name, *options in quoted:
        if name != "NAME":
            known = make_parser(name)[1].format_help()
            offenders += [
                f"{name} {option}"
                for option in options
                if option.startswith("-") and not re.search(rf"{option}[ ,\]]", known)
            ]
    assert offenders == []


def test_the_page_lists_every_command() -> None:
    listed = re.findall(r"^\| `(\w+)", LAB.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(listed) == set(NAMES)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(ModuleNotFoundError):
        make_parser("no_such")

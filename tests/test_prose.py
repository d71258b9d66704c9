"""Descriptions in docstrings stand alone: none begins with a preposition or a question word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import SOURCES

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DANGLING = re.compile(
    r" {4}([*\w.]+: +)?"
    r"(Of|That|At|With|Under|By|From|In|On|As(?! in `)|Which|What|How|Where|When|Why|Who)\b"
)


def _dangling(source: str) -> Iterator[str]:
    """Descriptions that begin with a forbidden word."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    for docstring in filter(None, map(ast.get_docstring, nodes)):
        section = ""
        for line in docstring.splitlines():
            if line and not line.startswith(" "):
                section = line
            elif section in ("Attributes:", "Args:", "Returns:") and DANGLING.match(line):
                yield line.strip()
            if section == "Returns:" and line != section:
                section = ""  # the following lines continue the description


def test_descriptions_stand_alone() -> None:
    offenders = [
        f"{module}: {line}" for module, source in SOURCES.items() for line in _dangling(source.text)
    ]
    assert offenders == []


def test_the_checker_finds_dangling_descriptions() -> None:
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
        """Read.

        Args:
            *names: Where they are.

        Returns:
            As the one before. The second
            By this line.
        """
'''
    assert list(_dangling(source)) == [
        "step: Of the run, which",
        "*names: Where they are.",
        "As the one before. The second",
    ]

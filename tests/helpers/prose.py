"""Openings, words and lengths that prose of this project does without.

Run as a script, it lists the offenders below the folders or pages given.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Sentences of so many words are two sentences.
LONG = 35
QUESTION = re.compile(r"(What|How|Who|Where|Which|When|That|From|However)\b")
NOUN_FIRST = re.compile(r"(The|A|An|One|All|Any|None)\b")
COMMENT = re.compile(r"(What|How|Where|Which|Of|Most|Least|Fewest)\b")
EXTREME = re.compile(r"(Most|Least|Fewest)\b")
DANGLING = re.compile(
    r"(Of|That|At|With|Under|By|From|In|On|As(?! in `)|Which|What|How|Where|When|Why|Who)\b"
)
HOUSE_WORDS = re.compile(
    r"\b(ways? of decoding|made ahead|takes? in|taken in|out of the text|the text before|but for"
    r"|anew|dear(er)?|whoever|of late|None where"
    r"|(is|are|was|were) (told|looked at|thought|learnt from|asked for)"
    r"|what [\w' ]{1,40}? (takes|costs))\b",
    re.IGNORECASE,
)
SECTIONS = ("Attributes:", "Args:", "Returns:")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Offence(NamedTuple):
    where: str
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.words[:90]}"


def in_source(name: str, text: str) -> Iterator[Offence]:
    """Offences in the docstrings, comments and option helps of a Python file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            line = node.body[0].lineno
            for rule, words in _in_docstring(node, docstring):
                yield Offence(f"{name}:{line}", rule, words)
        for value in _helps(node):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from _in_words(f"{name}:{value.lineno}", str(value.value))
                if EXTREME.match(str(value.value)):
                    yield Offence(f"{name}:{value.lineno}", "opening of a help", str(value.value))
    for line, comment, num_constants in _comments(text):
        where = f"{name}:{line}"
        if COMMENT.match(comment):
            yield Offence(where, "opening of a comment", comment)
        if num_constants > 1:
            yield Offence(where, "one comment for several constants", comment)
        yield from _in_words(where, comment)


def _helps(node: ast.AST) -> list[ast.expr]:
    """Help of an option: an argument, or the description of an annotated type."""
    if isinstance(node, ast.Call):
        return [one.value for one in node.keywords if one.arg == "help"]
    if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != "Annotated":
        return []
    return node.slice.elts[1:2] if isinstance(node.slice, ast.Tuple) else []


def in_page(name: str, text: str) -> Iterator[Offence]:
    """Offences in the prose of a Markdown page; code blocks are left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*|#\d])", prose):
        if not block.lstrip().startswith(("|", "<", "#")):
            yield from _in_words(name, " ".join(block.split()))


def _in_docstring(node: ast.AST, docstring: str) -> Iterator[tuple[str, str]]:
    summary = docstring.split("\n\n")[0].replace("\n", " ")
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    is_property = any("property" in ast.unparse(one) for one in decorators)
    if QUESTION.match(summary):
        yield "opening of a summary", summary
    if is_function and not is_property and NOUN_FIRST.match(summary):
        yield "a function's summary begins with a verb", summary
    section, kept = "", []
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            section = line
        elif section in SECTIONS and (entry := re.fullmatch(r" {4}(?:[*\w.]+: +)?(\S.*)", line)):
            if DANGLING.match(entry[1]) or EXTREME.match(entry[1]):
                yield "opening of a description", line.strip()
        if section == "Returns:" and line != section:
            section = ""  # the following lines continue the description
        kept.append("" if line in SECTIONS else re.sub(r"^ {4}[*\w.]+: ", "\n", line))
    for paragraph in re.split(r"\n\s*\n|\n\n", "\n".join(kept)):
        is_table = paragraph.lstrip("\n").startswith("    ")
        if not is_table and not paragraph.lstrip().startswith((">>>", "```")):
            for found in _in_words("", " ".join(paragraph.split())):
                yield found.rule, found.words


def _in_words(where: str, words: str) -> Iterator[Offence]:
    """House words, and sentences that are too long."""
    plain = re.sub(r"`[^`]*`(?:, `[^`]*`)*|\([^()]*\)", " x ", words)  # a list of names is one word
    if match := HOUSE_WORDS.search(plain):
        yield Offence(where, f"house words {match[0]!r}", words)
    for sentence in re.split(r"(?<=[.:;!?])\s", plain):
        if len(re.findall(r"\w[\w'-]*", sentence)) >= LONG:
            yield Offence(where, f"a sentence of {LONG} words or more", sentence)


def _comments(text: str) -> Iterator[tuple[int, str, int]]:
    """Blocks of full-line comments: line, words, and the constants right below."""
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    rows = [
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    ]
    for first in rows:
        if first - 1 in rows:
            continue
        last = first
        while last + 1 in rows:
            last += 1
        block = " ".join(
            lines[row - 1].strip().removeprefix("#").strip() for row in range(first, last + 1)
        )
        yield first, block, _num_constants(lines[last:])


def _num_constants(lines: list[str]) -> int:
    """Constants assigned by the lines right below a comment."""
    names: list[str] = []
    for line in lines:
        match = re.match(r"((?:[A-Z][A-Z0-9_]+, )*[A-Z][A-Z0-9_]+)(?:: [^=]+)? = ", line)
        if match is None:
            break
        names += match[1].split(", ")
        if line.rstrip().endswith(("(", "[", "{")):
            break  # the rest of a long value; what follows has a line of its own
    return len(names)


def in_paths(root: Path, paths: Iterable[Path]) -> Iterator[Offence]:
    """Offences in files, or in the Python files and pages below folders."""
    for path in paths:
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md")]
        for file in sorted(files):
            find = in_source if file.suffix == ".py" else in_page
            yield from find(str(file.relative_to(root)), file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for offence in in_paths(Path.cwd(), map(Path.absolute, map(Path, sys.argv[1:]))):
        print(offence)  # noqa: T201

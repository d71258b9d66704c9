"""A text on a terminal: what is left on the screen is the text, and its speed while it grows."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlx_redrafter.cli import live_text as module
from mlx_redrafter.cli.live_text import LiveText

WIDTH = 20
CODES = re.compile(r"\x1b\[(\??\d*(?:;\d+)*)([A-Za-z])|(.)", re.DOTALL)


def screen_of(output: str) -> list[str]:
    """Draw what a program writes to a terminal of `WIDTH` columns, as a terminal does."""
    rows, row, column = [""], 0, 0
    for argument, code, letter in CODES.findall(output):
        if code == "A":
            row -= int(argument)
        elif code == "K":
            rows[row] = ""
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row, column = row + 1, 0
        elif letter:
            if column == WIDTH:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
        assert row >= 0
    return [one.rstrip() for one in rows]


def response(text: str, number: int, is_draft: bool) -> Any:
    counts = {"generation_tps": 5.0, "tokens_per_step": None, "generation_tokens": number}
    return SimpleNamespace(text=text, from_draft=is_draft, **counts)


def write(pieces: list[str], shows_drafts: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=5)
    text = LiveText(console, shows_drafts)
    for number, piece in enumerate(pieces, start=1):
        text.add(response(piece, number, number % 2 == 0))
    text.finish()
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def always_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH", -1.0)


@given(st.lists(st.text("ab [/]\n", max_size=30), max_size=12))
def test_the_text_is_left_on_the_screen(pieces):
    """Long lines, marks of rich and all, and nothing else."""
    expected = "".join(pieces)
    rows = screen_of(expected.replace("\n", "\r\n"))
    assert screen_of(write(pieces))[: len(rows)] == rows
    assert not any(screen_of(write(pieces))[len(rows) :])


def test_the_speed_is_shown_while_the_text_grows():
    output = write(["one ", "two\n", "three"])
    growing = output[: output.index("\r", output.index("three"))]
    assert screen_of(growing)[:4] == ["one two", "three", "5.0 tokens/s, 33%", "drafted"]
    assert "tokens/s" not in " ".join(screen_of(output))


def test_drafts_are_coloured_on_request_and_controls_never_reach_the_terminal():
    pieces = ["a", "b", "\x1b[31m\x07\r"]
    assert "\x1b[32mb" in write(pieces, shows_drafts=True)
    assert "\x1b[32m" not in write(pieces)
    assert "\x1b[31m" not in write(pieces)
    assert "\x07" not in write(pieces)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_controls_reach_a_pipe_alone(monkeypatch, is_terminal):
    """`try` prints so, and every command on a terminal that cannot move its cursor."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    module.print_text(response("a\x1b[2J\n\tb", 1, False))
    assert stream.getvalue() == ("a\ufffd[2J\n\tb" if is_terminal else "a\x1b[2J\n\tb")

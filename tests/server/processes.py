"""The server's command as a process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.serving import ABSENT


@contextmanager
def process(*options: str, code: str = "", **how: Any) -> Iterator[subprocess.Popen[str]]:
    """The command with the bundled pair, after some lines of code."""
    pytest.importorskip("uvicorn", reason=ABSENT)
    program = f"import sys\n{code}\nfrom mlx_redrafter.cli.main import run\nrun()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how) as server:
        try:
            yield server
        finally:
            server.kill()


def port_of(server: subprocess.Popen[str]) -> int:
    """The port of a server that begins."""
    assert server.stderr is not None
    ports = (re.search(r"http://127.0.0.1:(\d+)", line) for line in server.stderr)
    return next(int(found[1]) for found in ports if found)

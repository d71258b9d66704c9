"""The server's command as a process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import ABSENT


@contextmanager
def process(folder: Path, *options: str, **how: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command with the bundled pair, and its port."""
    pytest.importorskip("uvicorn", reason=ABSENT)
    command = [sys.executable, "-m", "mlx_redrafter", "serve", "--port", "0", *options]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, **how) as server:
        try:
            yield server, port_of(server)
        finally:
            server.kill()


def port_of(server: subprocess.Popen[str]) -> int:
    """The port of a server that begins."""
    assert server.stderr is not None
    ports = (re.search(r"http://127.0.0.1:(\d+)", line) for line in server.stderr)
    return next(int(found[1]) for found in ports if found)

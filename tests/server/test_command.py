"""Options of ``redrafter-mlx serve``."""

import socket

import pytest

from tests.helpers.cli import Cli
from tests.server.serving import ABSENT


def test_options_are_checked_before_anything_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason=ABSENT)

    def refuse(message: str, *options: object) -> None:
        result = cli("serve", "--model", "/nowhere", *options)
        assert result.code == 2
        assert result.err.startswith(f"error: {message}")

    refuse("port must be", "--port", 70000)
    refuse("max_running must be", "--max-running", 0)
    refuse("api_key must be", "--api-key", "")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refuse(f"cannot listen at 127.0.0.1, port {port}: ", "--port", port)
    monkeypatch.setenv("REDRAFTER_API_KEY", "")
    refuse("api_key must be at least one character long")

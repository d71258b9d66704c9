"""``redrafter-mlx serve`` as a process."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.server.serving import ABSENT


def test_sigterm_lets_texts_end(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason=ABSENT)
    command = [sys.executable, "-m", "mlx_redrafter", "serve", "--drafter", "none", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            ports = (re.search(r"http://127.0.0.1:(\d+)", line) for line in server.stderr)
            port = next(int(found[1]) for found in ports if found)
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                body = {"prompt": "Once upon a time", "max_tokens": 150, "stream": True}
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                events = response.readline()
                server.send_signal(signal.SIGTERM)
                events += response.read()
            assert events.endswith(b"data: [DONE]\n\n")
            assert events.count(b"data: ") > 100
            with pytest.raises(ConnectionError):
                http.client.HTTPConnection("127.0.0.1", port).connect()
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_a_port_in_use_is_found_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("uvicorn", reason=ABSENT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run(capsys, "serve", "--model", "/nowhere", "--port", port)
    assert result.code == 2
    assert result.err.startswith(f"error: cannot listen at 127.0.0.1, port {port}: ")


def test_options_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--port", 70000), ("--max-running", 0), ("--api-key", "")):
        result = run(capsys, "serve", "--model", "/nowhere", option, value)
        assert result.code == 2
        assert result.err.startswith(f"error: {option[2:].replace('-', '_')} must be")


def test_an_empty_key_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_API_KEY", "")
    result = run(capsys, "serve", "--model", "/nowhere")
    assert result.code == 2
    assert result.err.startswith("error: api_key must be at least one character long")

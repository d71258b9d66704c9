"""``redrafter-mlx launch``: an agent gets a server and its settings, and leaves no trace.

At the end, options of ``redrafter-mlx serve``.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.cli.launch import AGENTS, ServerOptions
from tests.helpers.cli import PROGRAM, python, run
from tests.server.serving import KEY

# A program in place of an agent: it says how it was started, and asks the server.
FAKE = f"""#!{sys.executable}
import json, os, signal, sys, urllib.request
base = os.environ["ANTHROPIC_BASE_URL"]
headers = {{
    "Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
    "Content-Type": "application/json",
}}
body = {{
    "model": os.environ["ANTHROPIC_MODEL"],
    "max_tokens": 20,
    "messages": [{{"role": "user", "content": sys.argv[1]}}],
}}
asked = urllib.request.Request(base + "/v1/messages", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(asked))["content"][0]["text"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _write_agent(folder: Path, program: str = FAKE) -> None:
    (folder / "claude").write_text(program)
    (folder / "claude").chmod(0o755)


def test_an_agent_uses_the_server_that_runs(calling, tmp_path, monkeypatch, capfd):
    _write_agent(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    port = ("--port", calling.port)
    result = run(capfd, "launch", "claude", *port, "--api-key", KEY, "--", "Hello")
    assert (result.code, result.out) == (137, "Done.\n")
    assert "ANTHROPIC_AUTH_TOKEN=***" in result.err
    assert KEY not in result.err
    for agent, options, message in (
        ("claude", (), "answers with status 401; give its --api-key"),
        ("claude", ("--api-key", KEY, "--model", "org/other"), "serves tiny; leave --model out"),
        ("codex", ("--api-key", KEY), "npm install -g @openai/codex"),
    ):
        result = run(capfd, "launch", agent, *port, *options)
        assert result.code == 2
        assert message in result.err


# A program in place of an agent: it ends half a second after a signal, once it has saved its work.
SAVING = f"""#!{sys.executable}
import os, signal, sys, time
def save(number, _):
    time.sleep(0.5)
    os.write(1, b"saved\\n")
    sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
os.write(1, b"ready\\n")
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, 143)])
def test_an_agent_ends_in_its_own_time(calling, tmp_path, number, code):
    _write_agent(tmp_path, SAVING)
    where = {"PATH": str(tmp_path), "HOME": str(tmp_path), "REDRAFTER_API_KEY": KEY}
    command = [sys.executable, *PROGRAM, "launch", "claude", "--port", str(calling.port)]
    how: Any = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=where, **how) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if number == signal.SIGINT:  # a terminal sends it to both
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == code


def test_a_started_server_ends_with_its_agent(tmp_path):
    _write_agent(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("launch", "claude", "--port", port, "--drafter", "none")
    where = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = python(*PROGRAM, *words, env=where, timeout=280)
    assert "starting a server" in done.stderr
    assert "bundled has no chat template, which agents need" in done.stderr
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port))


def test_settings_are_printed_as_a_command(cli):
    result = cli("launch", "codex", "--port", "1", "--print", "--", "exec", "a b")
    words = shlex.split(result.out)
    assert words[0] == "codex"
    assert words[-2:] == ["exec", "a b"]
    assert 'model_providers.redrafter.base_url="http://127.0.0.1:1/v1"' in words
    assert "model_context_window=1024" in words
    assert "start it first: redrafter-mlx serve --port 1 " in result.err
    result = cli("launch", "codex", "--port", "1", "--print", "--yes", "--model", "org/none")
    assert result.err.rstrip().endswith("--model org/none --yes"), "no terminal answers a server"
    result = cli("launch", "codex", "--port", "1", "--print", "--api-key", "a b")
    assert "start it first: REDRAFTER_API_KEY='a b' redrafter-mlx serve" in result.err
    assert result.out.startswith("REDRAFTER_API_KEY='a b' codex ")
    result = cli("launch", "emacs", "--print")
    assert "agent must be one of claude, codex, opencode, qwen" in result.err


def test_every_agent_gets_the_address_and_the_model():
    for agent in AGENTS.values():
        for key in (None, "secret"):
            settings = agent.configure(ServerOptions(port=9, api_key=key), "org/model", 4096)
            text = json.dumps([settings.variables, settings.arguments])
            assert "http://127.0.0.1:9" in text
            assert "org/model" in text
            assert ("secret" in text) == (key is not None)


def test_a_model_without_tools_is_named(cli, served):
    served.text(prompt="A", max_tokens=1)  # loads it
    found = cli("launch", "codex", "--port", served.port, "--api-key", KEY, "--print").done()
    assert "tiny takes no tools" in found.err


def test_a_program_that_does_not_speak_http_is_no_server(cli):
    def greet(other: socket.socket) -> None:
        with other.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as thread:
        thread.submit(greet, other)
        result = cli("launch", "codex", "--port", other.getsockname()[1], "--print")
    assert result.code == 2
    assert "another program's server runs at" in result.err


def test_options_are_checked_before_loading(cli, monkeypatch):

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

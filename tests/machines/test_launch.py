"""``mlx.launch`` itself: rank 0 talks, and Ctrl-C ends all ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_redrafter import Engine, load
from mlx_redrafter.bench.lab.ranks import LIMIT, free_ports, preloaded
from mlx_redrafter.engine.conversation import Conversation
from tests.machines.test_ends import store_tiny

pytestmark = pytest.mark.timeout(600)  # ranks have a limit of their own
# The command ``mlx.launch``, which need not be on the path.
LAUNCHER = sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"
# Lines that a user types.
MESSAGES = ("The king", "In the old house")
# The messages alone, as the tiny model knows no roles.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def _wait_for(text: str, output: Path) -> None:
    end = time.monotonic() + LIMIT
    while text not in (found := output.read_text()):
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_chat_on_two_ranks_until_ctrl_c(tmp_path: Path) -> None:
    folder = store_tiny(tmp_path / "tiny")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    conversation = Conversation(Engine(*load(folder)[:2], None), None, {})
    options = {"max_tokens": 12, "temp": 0.0}
    expected = ["".join(r.text for r in conversation.ask(one, **options)) for one in MESSAGES]

    variables = [f"--env={name}={value}" for name, value in preloaded().items()]
    ports = ["--backend=ring", f"--starting-port={min(free_ports(2))}"]
    command = [sys.executable, "-m", "mlx_redrafter", "chat", "--model", str(folder)]
    command += ["--drafter", "none", "--max-tokens", "12", "--temp", "0"]
    output = tmp_path / "output"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [*LAUNCHER, "-n", "2", *ports, *variables, "--", *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, as a terminal's Ctrl-C reaches one
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as launched,
    ):
        try:
            assert launched.stdin is not None
            _wait_for("type a message", output)
            for message, answer in zip(MESSAGES, expected, strict=True):
                launched.stdin.write(f"{message}\n".encode())
                launched.stdin.flush()
                _wait_for(f"{answer}\n", output)
            os.killpg(launched.pid, signal.SIGINT)
            launched.wait(LIMIT)
            with pytest.raises(ProcessLookupError):  # no rank is left in the group
                os.killpg(launched.pid, 0)
        finally:
            if launched.poll() is None:
                os.killpg(launched.pid, signal.SIGKILL)
    assert output.read_text().count("2 machines: ") == 1

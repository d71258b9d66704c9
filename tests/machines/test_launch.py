"""``mlx.launch`` itself: rank 0 talks, and Ctrl-C or a rank that fails ends all ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_redrafter import Engine, load
from mlx_redrafter.bench.lab.machine_ends import end_by
from mlx_redrafter.bench.lab.ranks import LIMIT, free_ports, preloaded
from mlx_redrafter.checkpoint_files import named_parameters, write_checkpoint
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.engine.conversation import Conversation
from mlx_redrafter.machines.line import LOST
from tests.helpers.models import change_config
from tests.models.tiny_models import build, tiny_config

pytestmark = pytest.mark.timeout(600)  # ranks have a limit of their own
# The command ``mlx.launch``, which need not be on the path.
LAUNCHER = sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"
# Lines that a user types.
MESSAGES = ("The king", "In the old house")
# The messages alone, as the tiny model knows no roles.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def store_tiny(folder: Path) -> Path:
    """Write a tiny model with the bundled tokenizer, as mlx-lm stores one."""
    sizes = {"vocab_size": 4096, "max_position_embeddings": 4096}
    config = {**tiny_config("llama"), **sizes, "eos_token_id": 2}
    write_checkpoint(folder, config, named_parameters(build(config)))
    for path in find_bundled("target").glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def _wait_for(text: str, output: Path) -> None:
    end = time.monotonic() + LIMIT
    while text not in (found := output.read_text()):
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_chat_on_two_ranks_until_ctrl_c(tmp_path):
    folder = store_tiny(tmp_path / "tiny")
    change_config(folder, "tokenizer_config.json", chat_template=TEMPLATE)
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


def test_a_rank_that_fails_ends_the_other(tmp_path):
    end = end_by("a follower raises in a pass", str(store_tiny(tmp_path / "tiny")))
    assert end.codes == [LOST, 1]
    assert end.lines[0].startswith("redrafter-mlx: rank 1 (")
    assert end.lines[0].endswith("MemoryError: no memory for a buffer of 12 GB")

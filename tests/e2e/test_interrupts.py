"""Ctrl-C on a terminal ends every command soon, with exit code 130 and one line."""

import re

import pytest

from mlx_redrafter.checkpoints.bundled import find_bundled
from tests.helpers.cli import python
from tests.helpers.fake_hub import FakeHub
from tests.helpers.terminal import Ended, interrupt

# Seconds from Ctrl-C to the end; the machine of a test may be busy.
LONGEST = 20.0
TEXT = "Once upon a time there were two little cats in a big house. " * 40


def _check(ended: Ended, line: str) -> None:
    assert ended.code == 130, ended.output[-2000:]
    assert ended.seconds < LONGEST
    for wrong in ("Traceback", "Fatal Python error", "Exception ignored", "Aborted"):
        assert wrong not in ended.output
    assert line in ended.output
    # The last line is the only one behind the signal's echo that is no part of the display.
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ended.output).strip().splitlines()
    assert line in shown[-1]
    assert not line or shown[-1].startswith("stopped")


# Python's own start, of some 30 ms, is not this program's; its first import says that it is over.
IMPORTS = ("-X", "importtime", "-m", "mlx_redrafter")
COMPLETION = {
    "_REDRAFTER_MLX_COMPLETE": "complete_bash",
    "COMP_WORDS": "redrafter-mlx gen",
    "COMP_CWORD": "1",
}


@pytest.mark.parametrize(
    ("delay", "variables"), [(0.0, {}), (0.1, {}), (0.3, {}), (0.1, COMPLETION)]
)
def test_imports(delay, variables):
    first = "mlx_redrafter.backend"
    ended = interrupt(["--help"], first, delay, variables=variables, python=IMPORTS)
    assert ended.code in (0, 130)
    for wrong in ("Traceback", "Fatal Python error"):
        assert wrong not in ended.output


@pytest.mark.parametrize("name", ["interrupts.watch", "main.leave_machines"])
def test_before_and_after_a_command(name):
    code = (
        "from mlx_redrafter.cli import main\n"
        "from mlx_redrafter import interrupts\n"
        "def stop(*arguments, **options): raise KeyboardInterrupt\n"
        "main.main = lambda arguments: 0\n"
        f"{name} = stop\n"
        "main.run()\n"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("times", [1, 2])
def test_a_text(stories, times):
    arguments = ["generate", "--model", stories.folder, "-p", "Once", "-m", 100_000, "--temp", 1]
    ended = interrupt(arguments, "tokens/s", 0.2, times)
    # The second one may end the program before the line is there.
    _check(ended, "stopped" if times == 1 else "")


def test_the_question_of_a_chat(chat_folder):
    """One Ctrl-C in place of a message tells how to end the chat; a second one ends it."""
    ended = interrupt(["chat", "--model", chat_folder], ">> ", 0.2, 2)
    _check(ended, "stopped")
    assert ended.output.count(">> ") == 2
    assert "/bye, Ctrl-D or Ctrl-C once more ends the chat" in ended.output


def test_a_download(tmp_path):
    hub = FakeHub()
    hub.add("org/slow", find_bundled("target"))
    hub.pause = 2.0  # so the weights take half a minute

    def has_configuration() -> bool:
        return any(tmp_path.glob("*/snapshots/*/config.json"))

    variables = {"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path)}
    with hub.serving():
        variables["HF_ENDPOINT"] = hub.address
        words = ["pull", "org/slow"]
        ended = interrupt(words, has_configuration, 1.0, variables=variables)
    _check(ended, "stopped; complete files are kept, and the same command downloads the others")
    assert "B/s, " in ended.output
    assert has_configuration()
    assert not [*tmp_path.rglob("*.safetensors")]
    assert not [*tmp_path.rglob("*.incomplete")]


@pytest.mark.parametrize("after", ["needs about", "generating"])
def test_training(stories, tmp_path, after):
    (tmp_path / "texts.txt").write_text(f"{TEXT}\n\n" * 20)
    out = tmp_path / "drafter"
    data = ["--data", tmp_path / "texts.txt", "--out", out]
    ended = interrupt(["train", "--model", stories.folder, *data], after, 0.3)
    begun = (out / "run.json").exists()
    _check(ended, f"--out {out} --resume" if begun else "stopped; nothing was begun")


@pytest.mark.parametrize("ending", ["0", "sys.exit()"])
def test_the_end_of_python(ending):
    """A command that has ended has its own exit code."""
    code = (
        "import atexit, sys, time\n"
        "from mlx_redrafter.cli import main\n"
        "atexit.register(time.sleep, 1)\n"
        "atexit.register(print, 'ending', flush=True)\n"
        f"main.main = lambda arguments: {ending}\n"
        "main.run()\n"
    )
    ended = interrupt([], "ending", 0.2, python=("-c", code))
    assert (ended.code, ended.seconds > 0) == (0, True)
    assert ended.output.split() == ["ending", "^C"]


def test_what_holds_the_main_thread():
    """A computation of MLX that takes minutes."""
    code = (
        "from mlx_redrafter.cli import main\n"
        "import mlx.core as mx\n"
        "def hold(arguments):\n"
        "    x = mx.ones((2048, 2048))\n"
        "    for _ in range(5000): x = x @ x\n"
        "    print('holding', flush=True)\n"
        "    mx.eval(x)\n"
        "    return 0\n"
        "main.main = hold\n"
        "main.run()\n"
    )
    _check(interrupt([], "holding", 0.5, python=("-c", code)), "stopped")

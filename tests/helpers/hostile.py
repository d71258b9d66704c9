"""Hostile calls, made at random: command lines and damaged files, each from its number alone.

A call ends badly with an exception, a message of more than `MOST_LINES` lines or `MOST_CHARACTERS`
characters, without an error, or with another exit code than those that are documented.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx_redrafter  # noqa: F401  before MLX, for its faster BLAS
from mlx_redrafter import checkpoint_files
from mlx_redrafter.checkpoint_files import write_checkpoint
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.cli.main import main
from mlx_redrafter.proposers.checkpoint import save_drafter
from tests.helpers.cli import commands
from tests.helpers.models import random_drafter, tiny_llama, tiny_sizes

# Maximum number of lines about a call that fails.
MOST_LINES = 10
# Maximum number of characters of its error.
MOST_CHARACTERS = 1100
# Documented exit codes: success, failure or difference, wrong usage, Ctrl-C.
CODES = (0, 1, 2, 130)
# Arguments with which each command would do its work, and end in seconds.
COMMANDS: dict[str, list[str]] = {
    "generate": ["--model", "model", "--drafter", "drafter", "-p", "Hi", "-m", "2"],
    "chat": ["--model", "model", "--drafter", "drafter"],
    "serve": ["--model", "model", "--drafter", "drafter", "--port", "0"],
    "advise": ["model", "--chip", "M1 Max"],
    "check": ["--model", "model", "--drafter", "drafter", "-p", "Hi", "-m", "2"],
    "train": ["--model", "model", "--data", "text.txt", "--out", "new", "--dry-run", "--tokens",
        "200"],
    "convert": ["drafter", "new", "-q", "--q-group-size", "32"],
    "bench sweep": ["--model", "model", "--drafter", "drafter", "--prompts", "text.txt", "--out",
        "new", "--widths", "1", "--lengths", "2", "-m", "2"],
    "bench compare": ["--model", "model", "--drafter", "drafter", "--prompts", "text.txt",
        "--shapes", "1x3", "-m", "2", "--repeats", "1"],
    "bench speed": ["--model", "model", "--drafter", "drafter", "--prompts", "text.txt"],
    "bench share": ["text.txt", "-o", "new.md"],
    "bench throughput": ["--model", "model", "--drafter", "drafter", "--prompts", "text.txt",
        "--batch-sizes", "1", "--shapes", "1x3", "-m", "2", "--rounds", "1"],
    "run": ["model", "Hi", "-m", "2"], "try": ["model", "-m", "2"],
    "launch": ["claude", "--model", "model", "--print"], "list": [], "show": ["model"],
    "pull": ["nobody/nothing"], "rm": ["nobody/nothing"],
}  # fmt: skip
VALUES = (
    "", " ", "-", "--", "-1", "0", "1", "3", "1e999", "nan", "-inf", "0x10", "1_0", "٣", "true",
    "9" * 20, "9" * 5000, "a" * 300, "a/" + "b" * 300, "\udcff", "a\nb", "%s%n", "$(x)",
    "\x1b[2J", "[]", "{}", '{"a": 1}', "[" * 9999, '"', "null", "a,b", "1,,2", "1-99999999",
    "1x1x1", "/", "..", "~nobody", "/dev/null", "/dev/zero", "/proc/self/mem",
    "http://127.0.0.1:9/x", "model", "drafter", "text.txt", "bytes.txt", "empty.txt", "pipe",
    "loop", "nowhere", "new", "auto", "lookup", "none", "mtp", "model/config.json",
    "model/model.safetensors",
)  # fmt: skip
JSON_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, -0.5, "", "x", [], {}, [None], {"a": []},
    [10**9], [[[[]]]], {"type": "yarn"}, {"rope_type": 3}, "\ud800", "../x", float("nan"),
)  # fmt: skip
FILES = (
    "model/config.json", "model/model.safetensors", "model/tokenizer.json",
    "model/tokenizer_config.json", "drafter/config.json", "drafter/model.safetensors",
    "text.txt",
)  # fmt: skip


class Call(NamedTuple):
    """Arguments of a call, and the harm that ``damage`` does to a file of the current folder."""

    arguments: list[str]
    harm: str
    damage: Callable[[], None]


def build_yard(folder: Path) -> None:
    """Write a tiny Llama with the bundled model's tokenizer, a drafter of it, and texts."""
    bundled = find_bundled("target")
    config = json.loads((bundled / "config.json").read_text())
    model: Any = tiny_llama(vocab_size=config["vocab_size"], layers=1)
    sizes = {**tiny_sizes("llama", config["vocab_size"], 1024), "num_hidden_layers": 1}
    tensors = checkpoint_files.named_parameters(model)
    write_checkpoint(folder / "model", {**config, **sizes}, tensors)
    for path in bundled.glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    save_drafter(random_drafter(config["vocab_size"], 32), folder / "drafter")
    (folder / "text.txt").write_text("Once upon a time\n\nThe old man")
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text('{"prompt": ""}\n')
    (folder / "wrong.jsonl").write_text('{"prompt": 3}\n[\n')
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")


@contextlib.contextmanager
def no_room(size: int = 0) -> Iterator[None]:
    """Let no file grow beyond some bytes: as on a full disk, writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_call(number: int) -> Call:
    """Make a call: half of them are hostile command lines, half read a damaged file."""
    chance = random.Random(number)
    name = chance.choice(sorted(COMMANDS))
    words = list(COMMANDS[name])
    harm, damage = "", lambda: None
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 3)):
            _spoil(chance, name, words)
    else:
        harm, damage = _harm(chance)
    return Call([*name.split(), *words], harm, damage)


def run_call(call: Call) -> str | None:
    """Run a call in the current folder; return what is bad about its end, None if nothing is."""
    out, err = io.StringIO(), io.StringIO()
    call.damage()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("sys.stdin", io.StringIO("Hi\n")),
            _nothing_starts(),
        ):
            code = main(call.arguments)
    except Exception:
        return traceback.format_exc()
    lines = err.getvalue().splitlines()
    if code not in CODES:
        return f"exit code {code}"
    if "Traceback" in err.getvalue():
        return err.getvalue()
    if code and len(lines) > MOST_LINES:
        return f"{len(lines)} lines: {err.getvalue()[:2000]}"
    if code == 2 or (code == 1 and not out.getvalue()):
        if not lines or not lines[-1].startswith("error: "):
            return f"no error: {err.getvalue()[:2000]}"
        if len(lines[-1]) > MOST_CHARACTERS:
            return f"{len(lines[-1])} characters: {lines[-1][:2000]}"
    return None


@contextlib.contextmanager
def _nothing_starts() -> Iterator[None]:
    """Let servers end at once, no agent begin, and signals end this process as before."""
    absent = FileNotFoundError(2, "No such file or directory", "claude")
    with (
        mock.patch("uvicorn.Server.run", return_value=None),
        mock.patch("signal.signal"),
        mock.patch("mlx_redrafter.cli.launch.subprocess.call", side_effect=absent),
        mock.patch("mlx_redrafter.cli.launch.subprocess.Popen", side_effect=absent),
    ):
        yield


def _spoil(chance: random.Random, name: str, words: list[str]) -> None:
    """Change a command line: a value, a word too many, or one too few."""
    params = commands()[name].params
    options = [one.opts[-1] for one in params if one.opts[0].startswith("-")]
    way, value = chance.randrange(5), chance.choice(VALUES)
    if way < 3 and options:
        words += [chance.choice(options)] + ([value] if chance.random() < 0.8 else [])
    elif way == 3 and words:
        words[chance.randrange(len(words))] = value
    elif words and chance.random() < 0.5:
        del words[chance.randrange(len(words))]
    else:
        words.insert(chance.randint(0, len(words)), value)


def _harm(chance: random.Random) -> tuple[str, Callable[[], None]]:
    """Choose a harm to a file."""
    path = Path(chance.choice(FILES))
    kinds: list[Callable[[random.Random, Path], None]] = [_flip, _cut, _replace, _swap]
    kinds += [_change_config] * 6 if path.suffix == ".json" else [_change_header] * 4
    kind = chance.choice(kinds)
    seed = chance.randrange(2**32)
    return f"{kind.__name__} {path}", lambda: kind(random.Random(seed), path)


def _flip(chance: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(min(len(content), 4096))] = chance.randrange(256)
    path.write_bytes(content)


def _cut(chance: random.Random, path: Path) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _replace(chance: random.Random, path: Path) -> None:
    """Put something else in a file's place."""
    path.unlink()
    way = chance.randrange(5)
    if way == 0:
        path.mkdir()
    elif way == 1:
        os.mkfifo(path)
    elif way == 2:
        path.symlink_to(path.name)
    elif way == 3:
        path.symlink_to("/dev/zero")


def _swap(chance: random.Random, path: Path) -> None:
    shutil.copy(chance.choice([one for one in FILES if Path(one) != path]), path)


def _change_config(chance: random.Random, path: Path) -> None:
    config = json.loads(path.read_text())
    for _ in range(chance.randint(1, 3)):
        key = chance.choice([*config, "quantization", "rope_scaling", "text_config", "layer_types"])
        config[key] = chance.choice(JSON_VALUES)
    path.write_text(json.dumps(config))


def _change_header(chance: random.Random, path: Path) -> None:
    """Change a safetensors header; flip bits in files of another kind."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
        entry = header[chance.choice(sorted(header))]
        entry[chance.choice([*entry, "x"])] = chance.choice(JSON_VALUES)
    except (ValueError, TypeError, KeyError, IndexError):
        _flip(chance, path)
        return
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])

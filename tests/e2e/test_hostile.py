"""Hostile calls: whatever is wrong, one line says it, and no file is lost or half-written.

Every failing command ends with exit code 1 or 2, one line that begins with "error: ", and nothing
on stdout; the folder that it ran in is as before, names and bytes.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy.ma  # noqa: F401  (numpy imports it late, when a test may have no right to)
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from mlx_redrafter import hub
from mlx_redrafter.convert import publication
from mlx_redrafter.measured import load_or_time
from tests.helpers.cli import Cli, commands
from tests.helpers.hostile import COMMANDS, make_call, no_room, run_call
from tests.helpers.models import change_config, change_tensors

NOBODY = 65534


def snapshot(folder: Path) -> dict[str, str]:
    """Names and bytes of all that is in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    """A failure leaves a folder as it is."""
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def refused(
    cli: Cli, yard: Path, *arguments: object, codes: tuple[int, ...] = (1, 2), parts: str = ""
) -> str:
    """The one line about a command that fails and changes nothing."""
    with nothing_changes(yard):
        return failure(cli, *arguments, codes=codes, parts=parts)


def failure(cli: Cli, *arguments: object, codes: tuple[int, ...], parts: str = "") -> str:
    """The one line about a command that fails; it has parts, between which stands " ... "."""
    result = cli(*arguments)
    lines = result.err.splitlines()
    assert (result.code in codes, result.out) == (True, ""), (arguments, result)
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], arguments
    assert "Traceback" not in result.err
    assert all(part in lines[-1] for part in parts.split(" ... ")), lines[-1]
    return lines[-1]


def test_every_command_would_do_its_work(cli, yard):
    """So that what is refused below is refused for what is wrong with it."""
    assert set(COMMANDS) == OPTIONS.keys() - {"ls"}  # another name of list
    for name in ("generate", "check", "convert", "run", "list"):
        shutil.rmtree("new", ignore_errors=True)
        result = cli(*name.split(), *COMMANDS[name])
        assert result.code == 0, (name, result.err)


def _numbers(command: Any) -> list[str]:
    """Options that take a number."""
    kinds = [(max(one.opts, key=len), str(one.type_descriptor)) for one in command.params]
    return [
        option
        for option, kind in kinds
        if option.startswith("--") and any(word in kind for word in ("int", "float", "Any"))
    ]


OPTIONS = {name: _numbers(one) for name, one in commands().items() if not hasattr(one, "commands")}


@pytest.mark.parametrize("command", [name for name, found in OPTIONS.items() if found])
def test_numbers_that_are_none(cli, yard, command):
    words = [*command.split(), *COMMANDS[command]]
    with nothing_changes(yard):
        for option, value in product(OPTIONS[command], ("x", "-99999999999", "nan", "")):
            failure(cli, *words, f"{option}={value}", codes=(2,))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_calls_made_at_random_end_well(yard, tmp_path, untouched, monkeypatch, first):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for number in range(first, first + 10):
        folder = tmp_path / str(number)
        shutil.copytree(untouched, folder)
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")
        monkeypatch.chdir(folder)
        call = make_call(number)
        assert run_call(call) is None, (number, call)


def config(name: str = "config.json", /, **values: Any) -> Callable[[Path], None]:
    """Change values of a JSON file."""
    return lambda folder: change_config(folder, name, **values)


def text(name: str, text: str | bytes) -> Callable[[Path], None]:
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, length)


def folder_instead(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def tensors(**changes: mx.array) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: {**tensors, **changes})


HUGE = 2**40
DEEP = "[" * 100_000
# Others are in `tests/unit/test_checkpoint.py`.
DAMAGED_FILES: dict[str, Callable[[Path], None]] = {
    "config is cut": cut("config.json", 30),
    "config is a folder": folder_instead("config.json"),
    "config is gone": gone("config.json"),
    "weights are cut": cut("model.safetensors", 5000),
    "weights are a folder": folder_instead("model.safetensors"),
    "weights are gone": gone("model.safetensors"),
}


def _values(**values: tuple[object, ...]) -> dict[str, Callable[[Path], None]]:
    """Changes of a config to each of some values."""
    return {
        f"{key} {value!r}": config(**{key: value}) for key, some in values.items() for value in some
    }


DAMAGED_MODEL = {
    **_values(
        hidden_size=(0, HUGE, "wide", [32]),
        num_hidden_layers=(-3, HUGE, True),
        num_attention_heads=(0, 3),
        num_key_value_heads=(3, "two"),
        head_dim=(0, HUGE, "8"),
        vocab_size=(7, HUGE, "all"),
        intermediate_size=(HUGE,),
        max_position_embeddings=(-5, "long"),
        rope_scaling=("yarn", {"type": "quadratic"}, ["linear"]),
        layer_types=(5,),
        rms_norm_eps=("small",),
        quantization=(3, "4bit"),
        model_type=(None, [], "nothing"),
    ),
    "tokenizer_config is a list": text("tokenizer_config.json", "[]"),
    "tokenizer_config is cut": cut("tokenizer_config.json", 20),
    "tokenizer is cut": cut("tokenizer.json", 900),
    "a weight too many": tensors(foreign=mx.zeros((3,))),
    "an embedding of another shape": tensors(**{"model.embed_tokens.weight": mx.zeros((3, 5))}),
}
# Other values out of range are in `tests/unit/test_checkpoint.py`.
DAMAGED_DRAFTER = {
    **_values(
        hidden_size=(2**24, 33),
        exit_dim=(2**24, 1.5),
        num_draft_layers=(64,),
        draft_vocab_size=(5,),
        score_scale=(-1, "x", 1e300),
        noise_share=(2,),
        model_type=([], "eagle"),
    ),
    "a weight too many": tensors(foreign=mx.zeros((3,))),
    "a weight of another shape": tensors(**{"rnn_u.bias": mx.zeros((3, 5))}),
}


def _cases(*tables: dict[str, Any]) -> list[Any]:
    return [pytest.param(change, id=name) for table in tables for name, change in table.items()]


@pytest.mark.parametrize("damage", _cases(DAMAGED_FILES, DAMAGED_MODEL))
def test_damaged_models(cli, yard, damage):
    damage(yard / "model")
    refused(cli, yard, "generate", *COMMANDS["generate"])


@pytest.mark.parametrize("damage", _cases(DAMAGED_FILES, DAMAGED_DRAFTER))
def test_damaged_drafters(cli, yard, damage):
    damage(yard / "drafter")
    refused(cli, yard, "generate", *COMMANDS["generate"], codes=(1,))


@pytest.mark.parametrize("damage", _cases(DAMAGED_FILES))
def test_damaged_sources(cli, yard, damage):
    damage(yard / "drafter")
    with nothing_changes(yard):
        for arguments in (COMMANDS["convert"], ["drafter"]):
            result = cli("convert", *arguments)
            shutil.rmtree("new", ignore_errors=True)
            # The tensors alone may tell what a drafter is.
            assert result.code == 1 or "config is gone" in os.environ["PYTEST_CURRENT_TEST"]
            assert result.code == 0 or result.err.startswith("error: ")


GENERATE = ["generate", *COMMANDS["generate"]]
COMPARE = ["bench", "compare", *COMMANDS["bench compare"]]
SPEED = ["bench", "speed", *COMMANDS["bench speed"]]
MEASURE = ["bench", "throughput", *COMMANDS["bench throughput"]]
# Words after the command, each wrong by itself; others are in `test_bad_input`,
# `test_destinations` and the tests of the benchmarks.
WORDS: dict[str, list[str]] = {
    "a check of nothing": ["check", "-p", ""],
    "an empty prompt in a file": [*COMPARE, "--prompts", "empty.jsonl"],
    "prompts in a folder": [*COMPARE, "--prompts", "model"],
    "no prompts": [*COMPARE, "--num-prompts", "0"],
    "a deep template": [*GENERATE, "--chat-template-config", DEEP],
    "a template of many digits": [*GENERATE, "--chat-template-config", "1" * 5000],
    "a cache of a model": [*GENERATE, "--prompt-cache-file", "model/model.safetensors"],
    "a cache in a folder": [*GENERATE, "--prompt-cache-file", "model"],
    "a size of words": ["advise", "model", "--tokens", "large"],
    "a server at an impossible port": [*SPEED, "--server", "a=http://127.0.0.1:999999/v1"],
    "a batch larger than the prompts": [*SPEED, "--batch-sizes", "99"],
    "a dataset without a repository": [*SPEED, "--prompts", "nobody/nothing:all"],
    "a page of no result": ["bench", "share", "text.txt", "-o", "new.md"],
    "a result that is no text": [*COMPARE, "--out", "bytes.txt", "--resume"],
    "a result beyond a file": [*MEASURE, "--out", "text.txt/new.json"],
    "a result of a long name": [*MEASURE, "--out", "a" * 300 + ".json"],
    "a repository of a long name": [*GENERATE, "--model", "a/" + "a" * 300],
    "a model of no name": [*GENERATE, "--model", ""],
    "a model beyond a file": [*GENERATE, "--model", "text.txt/model"],
    "a file for an adapter": [*GENERATE, "--adapter-path", "text.txt"],
    "an empty adapter": [*GENERATE, "--adapter-path", "drafter"],
    "a file for a drafter": [*GENERATE, "--drafter", "text.txt"],
    "a drafter for a model": [*GENERATE, "--model", "drafter"],
    "a destination beyond a file": ["convert", "drafter", "text.txt/new"],
    "a destination of a long name": ["convert", "drafter", "n" * 300],
    "an export of a model": ["convert", "model", "new", "--to", "pytorch"],
}


@pytest.mark.parametrize("arguments", WORDS.values(), ids=WORDS)
def test_words_that_fit_nowhere(cli, yard, arguments):
    refused(cli, yard, *arguments)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read and write everything, so for once it is nobody."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


LOCKED: dict[str, tuple[str, int, list[str]]] = {
    "model without x": ("model", 0o644, GENERATE),
    "config": ("model/config.json", 0, GENERATE),
    "weights": ("model/model.safetensors", 0, GENERATE),
    "tokenizer": ("model/tokenizer.json", 0, GENERATE),
    "drafter": ("drafter", 0, GENERATE),
    "drafter's weights": ("drafter/model.safetensors", 0, ["check", *COMMANDS["check"]]),
    "source's weights": ("drafter/model.safetensors", 0, ["convert", "drafter"]),
    "prompts": ("text.txt", 0, COMPARE),
    "destination": (".", 0o555, ["convert", "drafter", "new"]),
    "result": (".", 0o555, [*MEASURE, "--out", "new.json"]),
}


@pytest.mark.parametrize("case", LOCKED.values(), ids=LOCKED)
def test_what_must_not_be_read_or_written(cli, untouched, monkeypatch, case):
    path, mode, arguments = case
    with TemporaryDirectory() as temporary:  # in a folder that everyone may enter
        os.chmod(temporary, 0o755)
        yard = Path(temporary) / "yard"
        shutil.copytree(untouched, yard)
        monkeypatch.chdir(yard)
        if os.geteuid() == 0:
            for one in (yard, *yard.rglob("*")):
                os.chown(one, NOBODY, NOBODY)
        with nothing_changes(yard):
            os.chmod(path, mode)
            with without_rights():
                result = cli(*arguments)
            os.chmod(path, 0o755)
        monkeypatch.chdir("/")
    last = result.err.splitlines()[-1]
    assert (result.code in (1, 2), last.startswith("error: ")) == (True, True), result
    assert "truncated" not in last
    assert "Permission denied; choose a path that you may use" in last


CONVERT = ["convert", "drafter", "new"]
FULL = CONVERT, [*CONVERT, "--to", "pytorch"], [*MEASURE, "--out", "new.json"]


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("arguments", FULL, ids=["convert", "export", "result"])
def test_no_room_for_a_file(cli, yard, monkeypatch, arguments, room):
    """A bound on the size of files stands for a full disk: writing fails in the same places."""
    monkeypatch.setattr("mlx_redrafter.bench.speed.time_shapes", lambda *_: None)
    with nothing_changes(yard), no_room(room):
        result = cli(*arguments)
    last = result.err.splitlines()[-1]
    assert (result.code, last[:7]) == (1, "error: "), result
    assert "make room on the disk" in last
    assert str(yard / "new") in last or "new.json" in last


HUB_ERRORS = [
    LocalEntryNotFoundError("not in the cache"),
    TimeoutError(),
    RuntimeError("Data processing error: CAS service error\nmore"),
    HFValidationError("no name"),
    # What the client's own network library raises, which is another one in every version.
    type("ConnectError", (Exception,), {})("[Errno -3] Temporary failure in name resolution"),
]


@pytest.mark.parametrize("error", HUB_ERRORS, ids=lambda error: type(error).__name__)
def test_offline(cli, yard, monkeypatch, error):
    monkeypatch.setattr(hub.HfApi, "model_info", Mock(side_effect=error))
    for option in ("--model", "--drafter"):
        line = refused(cli, yard, "generate", "-p", "Hi", option, "org/name", codes=(1,))
        assert "check the name and the network, or give a folder" in line
    refused(cli, yard, "convert", "org/name", "new", codes=(1,))

    monkeypatch.setattr(publication.HfApi, "create_repo", Mock(side_effect=error))
    result = cli(*CONVERT, "--upload-repo", "org/name")
    last = result.err.splitlines()[-1]
    assert result.code == 1
    assert last.startswith("error: new is complete but could not be uploaded")
    assert (yard / "new" / "model.safetensors").is_file()


def _timing(rounds: str, runs: str = '1, "doubted": false') -> str:
    return f'{{"rounds": {rounds}, "runs": {runs}}}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", DEEP, _timing('[{"a": 1}]', '9, "doubted": false')),
        *(_timing('[{"a": 1}]', "1"), _timing("3"), _timing("[]"), _timing('[{"a": [1]}]')),
        *(_timing(f'[{{"a": {bad}}}]') for bad in ("0", "NaN", "3600", "1" + "0" * 400)),
    ],
    ids=lambda content: content[:12],
)
def test_damaged_timings(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def rounds(*timed: dict[str, float]) -> list[Any]:
        return list(load_or_time("what", [], ["a"], lambda _: False, lambda: timed))

    assert rounds({"a": 0.5}) == [{"a": 0.5}]
    (path,) = (tmp_path / "mlx-redrafter").iterdir()
    path.write_text(content)
    assert rounds({"a": 0.75}) == [{"a": 0.75}]
    assert rounds() == [{"a": 0.75}]

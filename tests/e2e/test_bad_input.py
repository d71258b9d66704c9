"""Bad input: one line on stderr, nothing on stdout, exit code 1, or 2 for wrong usage."""

import errno
import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, save_prompt_cache

from mlx_redrafter import save_drafter
from mlx_redrafter.cli.generate import MAX_GRAMMAR_BYTES
from mlx_redrafter.errors import CheckpointError
from tests.e2e.test_hostile import GENERATE, config, failure, gone, refused, tensors, text
from tests.helpers.cli import PROGRAM, python
from tests.helpers.models import random_drafter

NOWHERE = "/no/such/folder"


# Without the model and the drafter, which are nowhere. Other values of numbers are refused in
# `test_hostile` and `tests/unit/test_checkpoint.py`.
USAGE = {
    "generate -p Hi --beam-width 65": "beam_width must be an integer from 1 to 64, got 65",
    "generate -p Hi --temp -1": "temp must be a number from 0 to 1e+06, got -1.0",
    "generate -p Hi -m 0": "max_tokens must be 1 or more, or -1 for no limit, got 0",
    "generate -p Hi --chat-template-config {": "--chat-template-config must be JSON",
    "generate -p Hi --chat-template-config []": "must be a JSON object, got []",
    "generate -p Hi -m many": "'--max-tokens'",
    "generate -p Hi --no-such-option": "--no-such-option",
    "generate": "--prompt",
    "check --beam-width 0": "beam_width must be an integer from 1 to 64, got 0",
    "check -m 0": "max_tokens must be an integer at least 1, got 0",
    "bench compare": "--prompts",
    "bench no-such-command": "no-such-command",
}


@pytest.mark.parametrize("words", USAGE)
def test_usage_is_checked_before_anything_is_loaded(cli, words):
    nothing = ["--model", NOWHERE, "--drafter", NOWHERE]
    command, *options = words.split()
    words_given = [command, *([] if command == "bench" else nothing), *options]
    failure(cli, *words_given, codes=(2,), parts=USAGE[words])


def test_without_a_drafter_drafts_come_out_of_the_text(stories, cli):
    """The text is stock mlx-lm's, with the word for it and without, and `check` says so."""
    prompt = "Tim had a red ball. Tim had a red ball. Tim had a"
    stock = mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=40)
    pair = ["--model", stories.folder, "-p", prompt, "-m", 40]
    for options in ([], ["--drafter", "lookup"], ["--drafter", "none"]):
        result = cli("generate", *pair, "--stats", *options)
        assert (result.code, result.out) == (0, stock + "\n")
        assert ("Speculative:" in result.err) == (options != ["--drafter", "none"])
    assert cli("check", *pair).done().out.startswith("equal: 40 tokens")


Damage = Callable[[Path], Any]


def _in(name: str, damage: Damage) -> Damage:
    return lambda yard: damage(yard / name)


def _none(yard: Path) -> None:
    """Damage nothing."""


def _other_model(yard: Path) -> None:
    (yard / "other").mkdir()
    (yard / "other" / "config.json").write_text('{"model_type": "rwkv7"}')


def _drafter(vocab_size: int, hidden_size: int) -> Damage:
    return lambda yard: save_drafter(random_drafter(vocab_size, hidden_size), yard / "drafter")


def _tokenizer(**values: Any) -> Damage:
    return _in("model", config("tokenizer_config.json", **values))


NAN_DRAFTER = _in("drafter", tensors(**{"rnn_u.bias": mx.full((32,), mx.nan)}))
NAN_LOGITS = _in("model", tensors(**{"model.norm.weight": mx.full((32,), mx.nan)}))
FAILS = "{{ raise_exception('No role') }}"
# What is done to the pair first, further words of the command, exit code, parts of the line.
UNUSABLE: dict[str, tuple[Damage, str, int, str]] = {
    "no UTF-8": (_none, "--model ./\udcff", 2, "expected a path in UTF-8, got './\\udcff'"),
    "a folder called lookup": (
        lambda yard: (yard / "lookup").mkdir(), "--drafter lookup", 2, "as well ... ./lookup"),
    "two kinds": (_in("drafter", config(model_type="llama")), "", 1, "several kinds ... 'llama'"),
    "a draft model": (_other_model, "--drafter other", 1, "'rwkv7' cannot be decoded exactly"),
    "a small vocabulary": (_drafter(4095, 32), "", 1, "4095 does not match the target's 4096"),
    "no config": (_in("model", gone("config.json")), "", 1,
        "no config.json ... weights alone; copy the other files of its repository, too"),
    "no tokenizer": (_in("model", gone("tokenizer.json")), "", 1,
        "no letters, as without its tokenizer.json; download or convert it again"),
    "foreign weights": (
        lambda yard: shutil.copy(yard / "drafter/model.safetensors", yard / "model"), "", 1,
        "mlx-lm cannot load"),
    "NaN weights": (NAN_DRAFTER, "", 1, "weights in rnn_u.bias ... convert or train it again"),
    "NaN logits": (NAN_LOGITS, "", 1, "logits after the prompt are NaN"),
    "NaN alone": (NAN_LOGITS, "--drafter none", 1, "logits after the prompt are NaN"),
    "a long prompt": (_none, f"-p '{'word ' * 1100}'", 2, "context is 1024 ... shorten the prompt"),
    # Nothing at all is left of it where the tokenizer adds no token of its own.
    "no prompt": (_tokenizer(add_bos_token=False), "-p ''", 2, "the prompt is empty; give"),
    # Python hands over bytes that are not UTF-8 as such signs.
    "no text": (_none, "-p \udcff\udcfe", 2, "the prompt must be UTF-8 text"),
    "no text from stdin": (_none, "-p -", 2, "the prompt must be UTF-8 text"),
    "no template": (_none, "--system-prompt x", 2, "--system-prompt needs a chat template"),
    "a bad template": (_tokenizer(chat_template=FAILS), "", 2, "chat template ... No role"),
    # Tokenizers answer the unknown token for a name they do not know.
    "no such token": (_none, "--extra-eos-token no-such", 2, "a token of the model ... no-such"),
    "no such id": (_none, "--extra-eos-token 4096", 2, "a token of the model or an id ... 4096"),
    "another adapter": (_in("drafter", text("adapter_config.json", '{"peft_type": "LORA"}')),
        "--adapter-path drafter", 1, "with the adapter drafter: "),
    "no adapter": (_none, f"--adapter-path {NOWHERE}", 1, f"no such adapter folder: {NOWHERE}"),
}  # fmt: skip
# The same for what is refused before the weights are read.
UNFIT: dict[str, tuple[Damage, str, int, str]] = {
    "hidden size": (_drafter(4096, 48), "", 1,
        "hidden_size 48 ... 32 ... use a drafter trained for this model"),
    "vocabulary": (_drafter(5000, 32), "", 1,
        "vocab_size 5000 ... 4096 ... use a drafter trained for this"),
    "a recurrent model": (_in("model", config(model_type="rwkv7")), "", 1,
        "rwkv7 ... mlx_lm.generate"),
    "an unknown model": (_in("model", config(model_type="none-such")), "", 1,
        "none-such ... mlx_lm"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNUSABLE, *UNFIT])
def test_what_cannot_be_used_is_one_line(yard, cli, monkeypatch, name):
    damage, words, code, parts = (UNUSABLE | UNFIT)[name]
    damage(yard)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\udcff"))
    if name in UNFIT:
        error = AssertionError("the target's weights were read")
        monkeypatch.setattr(mlx_lm, "load", Mock(side_effect=error))
    refused(cli, yard, *GENERATE, *shlex.split(words), codes=(code,), parts=parts)


def test_a_draft_model_of_other_tokens(stories, babyllama, cli):
    pair = ("--model", stories.folder, "--drafter", babyllama.folder)
    parts = "token ids are not the target's ... id 3 is ... same family"
    failure(cli, "generate", *pair, "-p", "Hi", "-m", 4, codes=(1,), parts=parts)


def test_prompt_caches_that_do_not_fit(stories, drafter_folder, cli, tmp_path):
    path = tmp_path / "cache.safetensors"
    words = ("--model", stories.folder, "--drafter", drafter_folder, "--prompt-cache-file", path)

    def refuse(code: int, parts: str) -> None:
        failure(cli, "generate", *words, "-p", "Hi", "-m", 4, codes=(code,), parts=parts)

    refuse(2, "is no cache of mlx_lm.cache_prompt")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refuse(2, "is no cache of mlx_lm.cache_prompt")
    cache = make_prompt_cache(stories.model)
    stories.model(mx.array([[1, 2]]), cache=cache)
    save_prompt_cache(str(path), cache, {"model": "another"})
    refuse(2, "was made with model 'another' ... give the same one")
    name = {"model": str(stories.folder)}
    save_prompt_cache(str(path), cache[:3], name)
    refuse(2, "prompt_cache has 3 layers, the model needs 5")
    rotating = [RotatingKVCache(max_size=8) for _ in range(5)]
    stories.model(mx.array([[1, 2]]), cache=rotating)
    save_prompt_cache(str(path), rotating, name)
    refuse(1, "found RotatingKVCache ... use mlx-lm")


def test_debug_shows_the_traceback(cli):
    with pytest.raises(CheckpointError):
        cli("--debug", "generate", "--model", NOWHERE, "-p", "Hi")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no connection to the hub"), "no connection to the hub"),
        (OSError(), "OSError"),
        (OSError(errno.ENODEV, "No such device"), "output: No such device"),
        (OSError(errno.ENODEV, "No device", "a"), "a: No device; choose another path"),
    ],
)
def test_an_error_of_the_system_says_what_is_known(cli, monkeypatch, error, message):
    monkeypatch.setattr("mlx_redrafter.cli.main.app", Mock(side_effect=error))
    found = cli("generate")
    assert (found.code, found.err) == (1, f"error: {message}\n")


def _redrafter(redirection: str) -> subprocess.CompletedProcess[str]:
    """Run the program by a shell, which can close a stream that Python cannot."""
    words = ["generate", "-p", "The", "-m", "4", "--stats", "--drafter", "none"]
    command = shlex.join([sys.executable, *PROGRAM, *words])
    return subprocess.run(
        f"{command} {redirection}", shell=True, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout_is_one_line():
    found = _redrafter("> /dev/full")
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "No space left on device; make room on the disk" in found.stderr.splitlines()[-1]


def test_closed_streams_are_no_error():
    found = _redrafter(">&- 2>&-")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    found = _redrafter("-p - <&-")
    assert (found.returncode, found.stdout) == (2, "")
    assert "the prompt is empty" in found.stderr


def test_signs_that_stdout_lacks_are_escaped():
    words = ("generate", "-p", "The", "-m", "9", "--drafter", "none", "--regex", "\u20ac")
    variables = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    found = python(*PROGRAM, *words, env=variables, text=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == b"\\u20ac\n"


def test_grammars_that_are_too_large_are_refused(cli, tmp_path):
    path = tmp_path / "schema.json"
    path.write_bytes(b" " * (MAX_GRAMMAR_BYTES + 1))
    for option, file, message in (
        ("--json-schema", path, "expected a grammar of at most 1048576 bytes"),
        ("--lark", Path("/dev/zero"), "expected a file with a grammar"),
    ):
        if file.exists():
            words = ("generate", "-p", "The", option, file)
            failure(cli, *words, codes=(2,), parts=f"{message} ... {file}")


def test_errors_are_short_and_printable(cli):
    """What a call or a file says may be long, and hold signs that move a terminal's cursor."""
    line = failure(cli, "rm", "a", "\x1b[2J" + "b" * 9999, codes=(2,))
    assert "unexpected extra argument(s) (\\x1b[2Jbbb" in line
    assert " [...] bbb" in line
    assert len(line) < 1100

"""Bad input: one line on stderr, nothing on stdout, exit code 1, or 2 for wrong usage."""

from __future__ import annotations

import errno
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, save_prompt_cache

from mlx_redrafter import save_drafter
from mlx_redrafter.cli.generate import MAX_GRAMMAR_BYTES
from mlx_redrafter.errors import CheckpointError
from tests.conftest import Trained
from tests.helpers.cli import PROGRAM, Cli
from tests.helpers.models import random_drafter

NOWHERE = "/no/such/folder"


def _assert_error(result: Any, code: int, *parts: str) -> None:
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


# Without the model and the drafter, which are nowhere.
USAGE = {
    "generate -p Hi --beam-width 65": "beam_width must be an integer from 1 to 64, got 65",
    "generate -p Hi --beam-length 1": "beam_length must be an integer from 2 to 16",
    "generate -p Hi --tree-nodes 66": "for beam_width 4 and beam_length 5, got 66",
    "generate -p Hi --select best": "select must be 'top_n' or 'beam', got 'best'",
    "generate -p Hi --temp -1": "temp must be a finite number, 0 or more, got -1.0",
    "generate -p Hi --top-p 2": "top_p must be a number from 0 to 1 (0: off), got 2.0",
    "generate -p Hi --top-k -3": "top_k must be an integer at least 0 (0: off), got -3",
    "generate -p Hi --min-p 1.5": "min_p must be a number from 0 to 1 (0: off), got 1.5",
    "generate -p Hi --seed -1": "seed must be an integer from 0 to 4294967295, got -1",
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
def test_usage_is_checked_before_anything_is_loaded(cli: Cli, words: str) -> None:
    nothing = ["--model", NOWHERE, "--drafter", NOWHERE]
    command, *options = words.split()
    _assert_error(cli(command, *([] if command == "bench" else nothing), *options), 2, USAGE[words])


def test_without_a_drafter_drafts_come_out_of_the_text(stories: Trained, cli: Cli) -> None:
    """The text is stock mlx-lm's, with the word for it and without, and `check` says so."""
    prompt = "Tim had a red ball. Tim had a red ball. Tim had a"
    stock = mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=40)
    pair = ["--model", stories.folder, "-p", prompt, "-m", 40]
    for options in ([], ["--drafter", "lookup"], ["--drafter", "none"]):
        result = cli("generate", *pair, "--stats", *options)
        assert (result.code, result.out) == (0, stock + "\n")
        assert ("Speculative:" in result.err) == (options != ["--drafter", "none"])
    result = cli("check", *pair)
    assert result.code == 0
    assert result.out.startswith("equal: 40 tokens")


def test_a_model_in_place_of_a_drafter(stories: Trained, cli: Cli) -> None:
    """One whose trees are exact drafts itself."""
    words = ("--model", stories.folder, "--drafter", stories.folder, "-p", "Hi", "-m", 4)
    stock = mlx_lm.generate(stories.model, stories.tokenizer, "Hi", max_tokens=4)
    assert cli("generate", *words)[:2] == (0, stock + "\n")


@pytest.fixture
def pair(stories: Trained, drafter_folder: Path, tmp_path: Path) -> Path:
    """A folder with a model and a drafter to damage."""
    shutil.copytree(stories.folder, tmp_path / "model")
    shutil.copytree(drafter_folder, tmp_path / "drafter")
    return tmp_path


TOKENIZER = "model/tokenizer_config.json"
FAILS = "{{ raise_exception('No role') }}"


def _change(name: str, **values: Any) -> Callable[[Path], None]:
    def change(pair: Path) -> None:
        path = pair / (name if name == TOKENIZER else f"{name}/config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _copy(source: str, destination: str) -> Callable[[Path], None]:
    return lambda pair: shutil.copy(pair / source, pair / destination) and None


def _folder(name: str) -> Callable[[Path], None]:
    return lambda pair: (pair / name).mkdir()


def _rwkv(pair: Path) -> None:
    (pair / "other").mkdir()
    (pair / "other" / "config.json").write_text('{"model_type": "rwkv7"}')


def _gone(pair: Path) -> None:
    (pair / "model" / "config.json").unlink()


def _zip(pair: Path) -> None:
    (pair / "model" / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(200))


def _drafter(vocab_size: int, hidden_size: int) -> Callable[[Path], None]:
    return lambda pair: save_drafter(random_drafter(vocab_size, hidden_size), pair / "drafter")


def _nan_drafter(pair: Path) -> None:
    drafter = random_drafter(512, 64)
    bias: Any = drafter.rnn_u.bias
    bias[0] = float("nan")
    save_drafter(drafter, pair / "drafter")


def _nan_logits(pair: Path) -> None:
    tensors: Any = mx.load(str(pair / "model" / "model.safetensors"))
    tensors = {**tensors, "model.norm.weight": mx.full((64,), float("nan"))}
    mx.save_safetensors(str(pair / "new.safetensors"), tensors)
    (pair / "new.safetensors").replace(pair / "model" / "model.safetensors")


Damage = Callable[[Path], Any]
# What is done to the pair first, further words of the command, exit code, parts of the line.
UNUSABLE: dict[str, tuple[Damage | None, str, int, str]] = {
    "no model": (None, f"--model {NOWHERE}", 1, NOWHERE),
    "no repository": (None, "--drafter nobody/nothing", 1, "nobody/nothing"),
    "a file": (None, "--model model/model.safetensors", 1, "checkpoint folder, found a file"),
    "a folder called lookup": (_folder("lookup"), "--drafter lookup", 2, "as well ... ./lookup"),
    "two kinds": (_copy("model/config.json", "drafter"), "", 1, "several kinds ... 'llama'"),
    "a draft model": (_rwkv, "--drafter other", 1, "'rwkv7' cannot be decoded exactly"),
    "a small vocabulary": (_drafter(511, 64), "", 1, "511 does not match the target's 512"),
    "no config": (_gone, "", 1, "no config.json ... weights alone; download the model again"),
    "cut weights": (_zip, "", 1, "is truncated or not a safetensors file ... model/model"),
    "foreign weights": (_copy("drafter/model.safetensors", "model"), "", 1, "mlx-lm cannot load"),
    "NaN weights": (_nan_drafter, "", 1, "weights in rnn_u.bias ... convert or train it again"),
    "NaN logits": (_nan_logits, "", 1, "logits after the prompt are NaN"),
    "NaN alone": (_nan_logits, "--drafter none", 1, "logits after the prompt are NaN"),
    "a long prompt": (None, f"-p '{'word ' * 600}'", 2, "context is 512 ... shorten the prompt"),
    # Nothing at all is left of it where the tokenizer adds no token of its own.
    "no prompt": (_change(TOKENIZER, add_bos_token=False), "-p ''", 2, "the prompt is empty; give"),
    # How Python hands over bytes that are not UTF-8.
    "no text": (None, "-p \udcff\udcfe", 2, "the prompt must be UTF-8 text"),
    "no text from stdin": (None, "-p -", 2, "the prompt must be UTF-8 text"),
    "no template": (None, "--system-prompt x", 2, "--system-prompt needs a chat template"),
    "a bad template": (_change(TOKENIZER, chat_template=FAILS), "", 2, "chat template ... No role"),
    # Tokenizers answer the unknown token for a name they do not know.
    "no such token": (None, "--extra-eos-token no-such", 2, "a token of the model ... no-such"),
    "no such id": (None, "--extra-eos-token 512", 2, "a token of the model or an id ... 512"),
    "no adapter": (None, f"--adapter-path {NOWHERE}", 1, f"no such adapter folder: {NOWHERE}"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_one_line(
    pair: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, words, code, parts = UNUSABLE[name]
    if damage is not None:
        damage(pair)
    monkeypatch.chdir(pair)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\udcff"))
    base = ("generate", "--model", "model", "--drafter", "./drafter", "-p", "Hi", "-m", 4)
    _assert_error(cli(*base, *shlex.split(words)), code, *parts.split(" ... "))


def test_a_draft_model_of_other_tokens(stories: Trained, babyllama: Trained, cli: Cli) -> None:
    pair = ("--model", stories.folder, "--drafter", babyllama.folder)
    result = cli("generate", *pair, "-p", "Hi", "-m", 4)
    _assert_error(result, 1, "token ids are not the target's", "id 3 is", "same family")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (_drafter(512, 48), ["hidden_size 48", "64", "use a drafter trained for this model"]),
        (_drafter(600, 64), ["vocab_size 600", "512", "use a drafter trained for this"]),
        (_change("model", model_type="rwkv7"), ["rwkv7", "mlx_lm.generate"]),
        (_change("model", model_type="none-such"), ["none-such", "mlx_lm"]),
    ],
)
def test_what_does_not_fit_is_refused_before_the_weights_are_read(
    pair: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, damage: Damage, parts: list[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target's weights were read")

    monkeypatch.setattr(mlx_lm, "load", fail)
    damage(pair)
    words = ("--model", pair / "model", "--drafter", pair / "drafter", "-p", "Hi")
    _assert_error(cli("generate", *words), 1, *parts)


def test_prompt_caches_that_do_not_fit(
    stories: Trained, drafter_folder: Path, cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "cache.safetensors"
    words = ("--model", stories.folder, "--drafter", drafter_folder, "--prompt-cache-file", path)

    def refuse(code: int, *parts: str) -> None:
        _assert_error(cli("generate", *words, "-p", "Hi", "-m", 4), code, *parts)

    refuse(2, "is no cache of mlx_lm.cache_prompt")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refuse(2, "is no cache of mlx_lm.cache_prompt")
    cache = make_prompt_cache(stories.model)
    stories.model(mx.array([[1, 2]]), cache=cache)
    save_prompt_cache(str(path), cache, {"model": "another"})
    refuse(2, "was made with model 'another'", "give the same one")
    name = {"model": str(stories.folder)}
    save_prompt_cache(str(path), cache[:3], name)
    refuse(2, "prompt_cache has 3 layers, the model needs 5")
    rotating = [RotatingKVCache(max_size=8) for _ in range(5)]
    stories.model(mx.array([[1, 2]]), cache=rotating)
    save_prompt_cache(str(path), rotating, name)
    refuse(1, "found RotatingKVCache", "use mlx-lm")


def test_debug_shows_the_traceback(cli: Cli) -> None:
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
def test_an_error_of_the_system_says_what_is_known(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("mlx_redrafter.cli.main.app", fail)
    found = cli("generate")
    assert (found.code, found.err) == (1, f"error: {message}\n")


def _redrafter(redirection: str) -> subprocess.CompletedProcess[str]:
    """Run the program by a shell, which can close a stream that Python cannot."""
    # With a width, so that drafts are not timed.
    words = ["generate", "-p", "The", "-m", "4", "--stats", "--beam-width", "2"]
    command = shlex.join([sys.executable, *PROGRAM, *words])
    return subprocess.run(
        f"{command} {redirection}", shell=True, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    found = _redrafter("> /dev/full")
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "No space left on device; make room on the disk" in found.stderr.splitlines()[-1]


def test_closed_streams_are_no_error() -> None:
    found = _redrafter(">&- 2>&-")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_grammars_that_are_too_large_are_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(b" " * (MAX_GRAMMAR_BYTES + 1))
    result = cli("generate", "-p", "The", "--json-schema", path)
    _assert_error(result, 2, "expected a grammar of at most 1048576 bytes", str(path))
    if Path("/dev/zero").exists():
        result = cli("generate", "-p", "The", "--lark", "/dev/zero")
        _assert_error(result, 2, "expected a file with a grammar", "/dev/zero")


def test_errors_are_short_and_printable(cli: Cli) -> None:
    """What a call or a file says may be long, and hold signs that move a terminal's cursor."""
    result = cli("rm", "a", "\x1b[2J" + "b" * 9999)
    _assert_error(result, 2, "unexpected extra argument(s) (\\x1b[2Jbbb", " [...] bbb")
    assert len(result.err) < 1100

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
from tests.conftest import Trained
from tests.helpers.cli import run
from tests.helpers.models import random_drafter

NOWHERE = "/no/such/folder"


def _assert_error(result: Any, code: int, *parts: str) -> None:
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam-width", 0], "beam_width must be an integer from 1 to 64, got 0"),
        (["--beam-width", 65], "beam_width must be an integer from 1 to 64, got 65"),
        (["--beam-length", 1], "beam_length must be an integer from 2 to 16"),
        (["--beam-length", 17], "got 17"),
        (["--tree-nodes", 1], "tree_nodes must be an integer from 2 to 65"),
        (["--tree-nodes", 66], "for beam_width 4 and beam_length 5, got 66"),
        (["--select", "beam", "--tree-nodes", 9], "tree_nodes cannot be chosen with select='beam'"),
        (["--select", "best"], "select must be 'top_n' or 'beam', got 'best'"),
        (["--temp", -1], "temp must be a finite number, 0 or more, got -1.0"),
        (["--top-p", 2], "top_p must be a number from 0 to 1 (0: off), got 2.0"),
        (["--top-k", -3], "top_k must be an integer at least 0 (0: off), got -3"),
        (["--min-p", 1.5], "min_p must be a number from 0 to 1 (0: off), got 1.5"),
        (["--seed", -1], "seed must be an integer from 0 to 4294967295, got -1"),
        (["--max-tokens", 0], "max_tokens must be 1 or more, or -1 for no limit, got 0"),
        (["--max-tokens", -2], "max_tokens must be an integer at least -1"),
        (["--chat-template-config", "{"], "--chat-template-config must be JSON"),
        (["--chat-template-config", "[]"], "--chat-template-config must be a JSON object, got []"),
        (["--max-tokens", "many"], "'--max-tokens'"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=str,
)
def test_options_are_checked_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    base = ["generate", "--model", NOWHERE, "--drafter", NOWHERE, "--prompt", "Hi"]
    _assert_error(run(capsys, *base, *options), 2, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam-width", 0], "beam_width must be an integer from 1 to 64, got 0"),
        (["--temp", -1], "temp must be a finite number, 0 or more, got -1.0"),
        (["--max-tokens", 0], "max_tokens must be an integer at least 1, got 0"),
    ],
    ids=str,
)
def test_options_of_check_are_checked_first_too(
    capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    base = ["check", "--model", NOWHERE, "--drafter", NOWHERE]
    _assert_error(run(capsys, *base, *options), 2, message)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "--model", NOWHERE, "--drafter", "none"], ["--prompt"]),
        (["bench", "compare"], ["--prompts"]),
        (["train", "--out", NOWHERE], ["--model"]),
        (["no-such-command"], ["no-such-command"]),
    ],
    ids=str,
)
def test_missing_options(
    capsys: pytest.CaptureFixture[str], arguments: list[object], parts: list[str]
) -> None:
    _assert_error(run(capsys, *arguments), 2, *parts)


def test_without_a_drafter_drafts_come_out_of_the_text(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is stock mlx-lm's, with the word for it and without, and `check` says so."""
    prompt = "Tim had a red ball. Tim had a red ball. Tim had a"
    stock = mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=40)
    base = ["generate", "--model", stories.folder, "-p", prompt, "-m", 40, "--stats"]
    for options in ([], ["--drafter", "lookup"], ["--drafter", "none"]):
        result = run(capsys, *base, *options)
        assert (result.code, result.out) == (0, stock + "\n")
        assert ("Speculative:" in result.err) == (options != ["--drafter", "none"])
    result = run(capsys, "check", "--model", stories.folder, "-p", prompt, "-m", 40)
    assert result.code == 0
    assert result.out.startswith("equal: 40 tokens")


def test_the_word_for_lookup_may_be_a_folder_too(
    stories: Trained,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lookup").mkdir()
    monkeypatch.chdir(tmp_path)
    result = _generate(capsys, stories.folder, "lookup")
    _assert_error(result, 2, "is a folder here as well", "./lookup")


def test_a_draft_model_of_other_tokens(
    stories: Trained, babyllama: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _generate(capsys, stories.folder, babyllama.folder)
    _assert_error(result, 1, "token ids are not the target's", "id 3 is", "same family")


def test_a_folder_with_the_signs_of_two_kinds(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(drafter_folder / "model.safetensors", tmp_path)
    shutil.copy(stories.folder / "config.json", tmp_path)
    result = _generate(capsys, stories.folder, tmp_path)
    _assert_error(result, 1, "several kinds", "recurrent drafter, draft model", "'llama'")


def _generate(
    capsys: pytest.CaptureFixture[str], model: object, drafter: object, *options: object
) -> Any:
    base = ["generate", "--model", model, "--drafter", drafter, "-m", 4]
    if "--prompt" not in options:
        base += ["--prompt", "Hi"]
    return run(capsys, *base, *options)


@pytest.mark.parametrize("name", [NOWHERE, "nothing-here", "nobody/nothing"])
def test_no_such_model(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _assert_error(_generate(capsys, name, drafter_folder), 1, name)
    _assert_error(_generate(capsys, stories.folder, name), 1, name)


def test_files_in_place_of_folders(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = (folder / "model.safetensors" for folder in (stories.folder, drafter_folder))
    expected = "expected a checkpoint folder, found a file"
    _assert_error(_generate(capsys, model, drafter_folder), 1, expected)
    _assert_error(_generate(capsys, stories.folder, drafter), 1, expected)


def test_a_model_in_place_of_a_drafter(
    stories: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One whose trees are exact drafts itself; another is refused by its config alone."""
    result = _generate(capsys, stories.folder, stories.folder)
    stock = mlx_lm.generate(stories.model, stories.tokenizer, "Hi", max_tokens=4)
    assert (result.code, result.out) == (0, stock + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "rwkv7"}')
    result = _generate(capsys, stories.folder, tmp_path)
    _assert_error(result, 1, "model_type 'rwkv7' cannot be decoded exactly")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the target's weights fails the test."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target's weights were read")

    monkeypatch.setattr(mlx_lm, "load", fail)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("vocab_size", "hidden_size", "parts"),
    [
        (512, 48, ["hidden_size 48", "64", "use a drafter trained for this model"]),
        (600, 64, ["vocab_size 600", "512", "use a drafter trained for this model"]),
    ],
)
def test_drafter_of_another_model_is_refused_before_the_weights_are_read(
    stories: Trained,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    vocab_size: int,
    hidden_size: int,
    parts: list[str],
) -> None:
    save_drafter(random_drafter(vocab_size, hidden_size), tmp_path)
    _assert_error(_generate(capsys, stories.folder, tmp_path), 1, *parts)


def test_drafter_of_a_smaller_vocabulary(
    stories: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_drafter(random_drafter(511, 64), tmp_path)
    result = _generate(capsys, stories.folder, tmp_path)
    _assert_error(result, 1, "vocab_size 511 does not match the target's 512")


@pytest.fixture
def model_copy(stories: Trained, tmp_path: Path) -> Path:
    """A copy of stories260k to damage."""
    return shutil.copytree(stories.folder, tmp_path / "model")


def _change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "config",
    [{"model_type": "rwkv7"}, {"model_type": "bitnet"}, {"model_type": "no-such-architecture"}],
    ids=str,
)
def test_unsupported_architecture(
    model_copy: Path,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
) -> None:
    _change_config(model_copy, **config)
    result = _generate(capsys, model_copy, drafter_folder)
    _assert_error(result, 1, config["model_type"], "mlx_lm.generate")


def test_a_folder_without_config(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_copy / "config.json").unlink()
    result = _generate(capsys, model_copy, drafter_folder)
    _assert_error(result, 1, "no config.json", "found weights alone; download the model again")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _replace_by_zip(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(200))


@pytest.mark.parametrize("damage", [_truncate, _replace_by_zip])
@pytest.mark.parametrize("whose", ["model", "drafter"])
def test_damaged_weights(
    model_copy: Path,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    damage: Callable[[Path], None],
    whose: str,
) -> None:
    drafter_copy = shutil.copytree(drafter_folder, tmp_path / "drafter")
    damage((model_copy if whose == "model" else drafter_copy) / "model.safetensors")
    result = _generate(capsys, model_copy, drafter_copy)
    _assert_error(result, 1, "is truncated or not a safetensors file", f"/{whose}/")


def test_weights_of_another_model(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(drafter_folder / "model.safetensors", model_copy / "model.safetensors")
    _assert_error(_generate(capsys, model_copy, drafter_folder), 1, "mlx-lm cannot load")


def test_weights_that_are_no_numbers(
    stories: Trained, model_copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drafter = random_drafter(512, 64)
    bias: Any = drafter.rnn_u.bias
    bias[0] = float("nan")
    save_drafter(drafter, tmp_path / "drafter")
    result = _generate(capsys, stories.folder, tmp_path / "drafter")
    _assert_error(result, 1, "NaN or infinite weights in rnn_u.bias", "convert or train it again")


@pytest.mark.parametrize("drafts", [False, True])
def test_logits_that_are_no_numbers(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str], drafts: bool
) -> None:
    tensors: Any = mx.load(str(model_copy / "model.safetensors"))
    tensors = dict(tensors)
    tensors["model.norm.weight"] = mx.full((64,), float("nan"))
    mx.save_safetensors(str(model_copy / "new.safetensors"), tensors)
    (model_copy / "new.safetensors").replace(model_copy / "model.safetensors")
    drafting = ["--drafter", drafter_folder] if drafts else ["--drafter", "none"]
    result = run(capsys, "generate", "--model", model_copy, *drafting, "-p", "Hi")
    _assert_error(result, 1, "logits after the prompt are NaN")


def test_prompt_longer_than_the_context(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _generate(capsys, stories.folder, drafter_folder, "--prompt", "word " * 600)
    _assert_error(result, 2, "the model's context is 512", "shorten the prompt")


def test_text_past_the_context_is_warned_about_once(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _change_config(model_copy, max_position_embeddings=12)
    base = ["generate", "--model", model_copy, "--drafter", drafter_folder, "-p", "Once", "-m", 30]
    base += ["--stats", "--beam-width", 2]  # without timing how long drafts take
    command = [sys.executable, "-m", "mlx_redrafter", *(str(option) for option in base)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("longer than the model's context of 12 tokens") == 1
    assert "Generation: 30 tokens" in done.stderr
    assert "context" not in done.stdout


def test_empty_prompt(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing at all is left of it where the tokenizer adds no token of its own."""
    values = json.loads((model_copy / "tokenizer_config.json").read_text())
    values["add_bos_token"] = False
    (model_copy / "tokenizer_config.json").write_text(json.dumps(values))
    result = _generate(capsys, model_copy, drafter_folder, "--prompt", "")
    _assert_error(result, 2, "the prompt is empty; give at least one token")


@pytest.mark.parametrize("as_option", [True, False])
def test_prompt_that_is_no_text(
    stories: Trained,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    as_option: bool,
) -> None:
    """How Python hands over bytes that are not UTF-8."""
    bad = "\udcff\udcfe"
    monkeypatch.setattr(sys, "stdin", io.StringIO(bad))
    result = _generate(
        capsys, stories.folder, drafter_folder, "--prompt", bad if as_option else "-"
    )
    _assert_error(result, 2, "the prompt must be UTF-8 text")


def test_system_prompt_without_a_template(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _generate(capsys, stories.folder, drafter_folder, "--system-prompt", "Be good")
    _assert_error(result, 2, "--system-prompt needs a chat template")


@pytest.mark.parametrize("token", ["no-such-token", "512", "-1"])
def test_unknown_stop_token(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    """Tokenizers answer the unknown token for a name they do not know."""
    options = ["--extra-eos-token", token]
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 2, "--extra-eos-token must be a token of the model or an id", token)


def test_template_that_fails(
    model_copy: Path, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((model_copy / "tokenizer_config.json").read_text())
    values["chat_template"] = "{{ raise_exception('System role not supported') }}"
    (model_copy / "tokenizer_config.json").write_text(json.dumps(values))
    result = _generate(capsys, model_copy, drafter_folder)
    _assert_error(result, 2, "chat template", "System role not supported")


def test_no_such_adapter(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--adapter-path", NOWHERE]
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 1, f"no such adapter folder: {NOWHERE}")


def test_prompt_caches_that_do_not_fit(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cache.safetensors"
    options = ["--prompt-cache-file", path]
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 2, "is no cache of mlx_lm.cache_prompt")

    path.write_bytes(b"PK\x03\x04" + bytes(100))
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 2, "is no cache of mlx_lm.cache_prompt")

    cache = make_prompt_cache(stories.model)
    stories.model(mx.array([[1, 2]]), cache=cache)
    save_prompt_cache(str(path), cache, {"model": "another"})
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 2, "was made with model 'another'", "give the same one")

    name = {"model": str(stories.folder)}
    save_prompt_cache(str(path), cache[:3], name)
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 2, "prompt_cache has 3 layers, the model needs 5")

    rotating = [RotatingKVCache(max_size=8) for _ in range(5)]
    stories.model(mx.array([[1, 2]]), cache=rotating)
    save_prompt_cache(str(path), rotating, name)
    result = _generate(capsys, stories.folder, drafter_folder, *options)
    _assert_error(result, 1, "found RotatingKVCache", "use mlx-lm")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    from mlx_redrafter.errors import CheckpointError

    with pytest.raises(CheckpointError):
        run(capsys, "--debug", "generate", "--model", NOWHERE, "-p", "Hi")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no connection to the hub"), "no connection to the hub"),
        (OSError(), "OSError"),
        (OSError(errno.ENODEV, "No such device"), "output: No such device"),
        (
            OSError(errno.ENODEV, "No such device", "a.json"),
            "a.json: No such device; choose another path",
        ),
    ],
)
def test_an_error_of_the_system_says_what_is_known(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    message: str,
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("mlx_redrafter.cli.main.app", fail)
    found = run(capsys, "generate")
    assert (found.code, found.err) == (1, f"error: {message}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    command = [sys.executable, "-m", "mlx_redrafter", "generate", "-p", "The", "-m", "4"]
    command += ["--beam-width", "2"]  # without timing how long drafts take
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300
        )
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "No space left on device; make room on the disk" in found.stderr.splitlines()[-1]


def _redrafter(redirection: str, *options: object) -> subprocess.CompletedProcess[str]:
    """Run the program by a shell, which can close a stream that Python cannot."""
    command = [sys.executable, "-m", "mlx_redrafter", "generate", "-p", "The", *map(str, options)]
    return subprocess.run(
        f"{shlex.join(command)} {redirection}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(redirection: str) -> None:
    found = _redrafter(redirection, "-m", 4, "--stats", "--beam-width", 2)
    assert (found.returncode, found.stdout) == (0, "")
    assert "Traceback" not in found.stderr
    assert ("Generation: 4 tokens" in found.stderr) == ("2>&-" not in redirection)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero on this system")
@pytest.mark.parametrize("option", ["--json-schema", "--lark"])
def test_a_grammar_without_an_end_is_refused(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    result = run(capsys, "generate", "-p", "The", option, "/dev/zero")
    _assert_error(result, 2, "expected a file with a grammar", "/dev/zero")


def test_a_grammar_that_is_too_large_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(b" " * (MAX_GRAMMAR_BYTES + 1))
    result = run(capsys, "generate", "-p", "The", "--json-schema", path)
    _assert_error(result, 2, "expected a grammar of at most 1048576 bytes", str(path))


def test_errors_are_short_and_printable(capsys: pytest.CaptureFixture[str]) -> None:
    """What a call or a file says may be long, and hold signs that move a terminal's cursor."""
    result = run(capsys, "rm", "a", "\x1b[2J" + "b" * 9999)
    _assert_error(result, 2, "unexpected extra argument(s) (\\x1b[2Jbbb", " [...] bbb")
    assert len(result.err) < 1100

"""``redrafter-mlx generate``: text, statistics, JSON, prompts, templates and caches."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from mlx_redrafter import __version__, load
from mlx_redrafter.cli.prompt_options import PromptOptions
from mlx_redrafter.engine import engine, stored_costs
from mlx_redrafter.proposers.redrafter import precision
from tests.conftest import Trained
from tests.helpers.cli import Cli, Result
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.models import change_tensors

PROMPT = "Once upon a time"
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("prompt_tokens", "generation_tokens", "steps", "seed"), int),
    **dict.fromkeys(("beam_width", "beam_length", "tree_nodes"), int),
    **dict.fromkeys(("text", "finish_reason", "select"), str),
    **dict.fromkeys(("tokens", "acceptance_rate_by_depth"), list),
    **dict.fromkeys(("tokens_per_step", "prompt_tps", "generation_tps", "peak_memory"), float),
}


@pytest.fixture
def drafted(stories: Trained, drafter_folder: Path, cli: Cli) -> Cli:
    """A function that generates 20 tokens with the random drafter."""

    def generate(*options: object, prompt: str = PROMPT) -> Result:
        base = ("generate", "--model", stories.folder, "--drafter", drafter_folder)
        return cli(*base, "--prompt", prompt, "-m", 20, *options)

    return generate


@pytest.fixture
def plain(drafted: Cli) -> Cli:
    """The same without a drafter."""
    return lambda *options, **prompt: drafted("--drafter", "none", *options, **prompt)


def _stock_text(stories: Trained, prompt: str = PROMPT) -> str:
    return mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=20)


def test_text_goes_to_stdout_and_statistics_to_stderr(stories, drafted):
    result = drafted("--beam-width", 2, "--beam-length", 3, "--tree-nodes", 4, "--stats")
    assert (result.code, result.out) == (0, _stock_text(stories) + "\n")
    beginnings = "==========", "Prompt: 5 tokens, ", "Generation: 20 tokens, ", "Peak memory: "
    lines = result.err.splitlines()
    for line, beginning in zip(lines, (*beginnings, "Speculative: 1."), strict=True):
        assert line.startswith(beginning)
    assert "tokens/step over" in lines[4]


def test_one_token_has_no_speed(drafted, plain):
    alone = plain("-m", 1, "--stats").err.splitlines()
    assert alone[2] == "Generation: 1 token, in the time of the prompt"
    assert json.loads(plain("-m", 1, "--json").out)["generation_tps"] is None
    values = json.loads(drafted("-m", 1, "--json").out)
    assert (values["steps"], values["tokens_per_step"]) == (0, None)
    assert "Speculative" not in drafted("-m", 1, "--stats").err


def test_half_precision_on_a_cpu_is_told(stories, tmp_path, cli):
    half = tmp_path / "half"
    shutil.copytree(stories.folder, half)
    change_tensors(half, lambda tensors: {k: t.astype(mx.float16) for k, t in tensors.items()})
    for folder, is_told in ((half, "cpu" in str(mx.default_device())), (stories.folder, False)):
        result = cli("generate", folder, "--prompt", PROMPT, "-m", 2)
        assert ("mlx_lm.convert --dtype float32" in result.err) == is_told, result.err


def test_drafts_made_ahead_change_no_text(stories, drafted):
    result = drafted("--predraft", 4, "--beam-width", 2, "--temp", 0, "--stats")
    assert (result.code, result.out) == (0, _stock_text(stories) + "\n")
    assert "results were foreseen" in result.err.splitlines()[5]


def test_plain_decoding_prints_the_same_text_and_no_speculation(stories, plain):
    result = plain("--stats")
    assert (result.code, result.out) == (0, _stock_text(stories) + "\n")
    assert "Speculative" not in result.err
    assert plain().err == ""
    values = json.loads(plain("--json").out)
    assert values.keys() == FIELDS.keys()
    assert (values["tokens_per_step"], values["acceptance_rate_by_depth"]) == (1.0, [])
    shape = {values[name] for name in ("beam_width", "beam_length", "tree_nodes", "select")}
    assert shape == {None}


def test_json_has_every_field_and_nothing_else_is_printed(stories, drafted):
    result = drafted("--json", "--beam-width", 4)
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out)
    assert {name: type(value) for name, value in values.items()} == FIELDS
    assert values["text"] == _stock_text(stories)
    prompt: list[int] = stories.tokenizer.encode(PROMPT)
    assert values["tokens"] == ids(stock_tokens(stories.model, prompt, 20))
    assert values["tokens_per_step"] == pytest.approx(19 / values["steps"])
    shape = {"beam_width": 4, "beam_length": 5, "tree_nodes": 9, "select": "top_n"}
    counts = {"prompt_tokens": len(prompt), "generation_tokens": 20, "finish_reason": "length"}
    assert values == {**values, **shape, **counts}
    chosen = json.loads(drafted("--json").out)  # step by step
    assert [chosen[name] for name in ("beam_width", "beam_length", "tree_nodes")] == ["auto"] * 3
    merged = json.loads(drafted("--json", "--select", "beam").out)
    assert (merged["tree_nodes"], merged["select"]) == (None, "beam")
    assert values["text"] == chosen["text"] == merged["text"]


@pytest.mark.parametrize("drafter", [[], ["--drafter", "none"]], ids=str)
def test_stop_token_is_counted_and_not_listed(stories, drafted, drafter):
    prompt: list[int] = stories.tokenizer.encode(PROMPT)
    tokens = ids(stock_tokens(stories.model, prompt, 20))
    end = tokens.index(tokens[6])
    values = json.loads(drafted("--json", "--extra-eos-token", tokens[6], *drafter).out)
    assert values["tokens"] == tokens[:end]
    assert (values["finish_reason"], values["generation_tokens"]) == ("stop", end + 1)


def test_a_seed_is_reported_and_repeats_the_text(drafted, plain):
    sampling = ["--temp", 1, "--top-p", 0.95, "--top-k", 50, "--min-p", 0.01, "--json"]
    sampling += ["--max-tokens", 60]  # shorter texts of this model may be equal by chance
    first, other = (json.loads(drafted(*sampling).out) for _ in range(2))
    assert first["seed"] != other["seed"]
    assert first["tokens"] != other["tokens"]
    for again in (drafted, plain):
        values = json.loads(again(*sampling, "--seed", first["seed"]).out)
        assert (values["tokens"], values["seed"]) == (first["tokens"], first["seed"])


def test_quantised_keys_and_values(cli):
    quantised = ("--kv-bits", 4, "--quantized-kv-start", 10)
    result = cli("generate", "--prompt", PROMPT, "--json", "--max-tokens", 40, *quantised).done()
    model, tokenizer, _ = load()
    prompt = tokenizer.encode(PROMPT)
    stock = stock_tokens(model, prompt, 40, kv_bits=4, quantized_kv_start=10)
    assert json.loads(result.out)["tokens"] == ids(stock)


def test_prompts_from_stdin_and_with_escapes(stories, plain, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert plain(prompt="-").out == _stock_text(stories) + "\n"
    escaped = plain(prompt="Lily\\nand\\tTom").out
    assert escaped == _stock_text(stories, "Lily\nand\tTom") + "\n"


def test_a_byte_order_mark_is_no_prompt(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8-sig")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + PROMPT))
    assert PromptOptions(prompt_file=path).read() == PromptOptions("-").read() == PROMPT


def test_an_unreadable_prompt_is_named_before_loading(cli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for options, message in (
        ((), "expected a prompt, found none; give --prompt or --prompt-file"),
        (("-p", "a", "-f", "b"), "expected one prompt, found another in --prompt-file"),
        (("-f", tmp_path / "none"), "none: No such file or directory"),
        (("-f", tmp_path), "expected a file with the prompt, found something else"),
        (("-f", tmp_path / "pipe"), "--prompt - reads standard input"),
    ):
        found = cli("generate", "--model", "/no/such/folder", *options)
        assert (found.code in (1, 2), message in found.err) == (True, True), found.err


def test_verbose_says_what_is_drafted_and_the_seed(stories, drafted, drafter_folder, cli):
    result = drafted("--verbose", "--seed", 7, "--beam-width", 4)
    assert "Seed: 7." in result.err
    assert "beam_width=4" in result.err
    assert result.out == _stock_text(stories) + "\n"
    result = drafted("--verbose", "--max-tokens", 40)
    lines = result.err.splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if "ms/step" in line) + 1 :]
    assert rows[0].startswith("nothing ")
    assert len(rows) > 1
    steps = re.search(r"over (\d+) steps", result.err)
    assert sum(int(row[19:25]) for row in rows) == int(steps[1])
    # The name that mlx-lm has for the option.
    alias = cli("generate", stories.folder, "--draft-model", drafter_folder, "-p", PROMPT, "-m", 20)
    assert alias.out == _stock_text(stories) + "\n"


def test_the_first_run_says_what_it_waits_for(drafted, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine, "step_costs", stored_costs.step_costs)  # the real ones
    # On a machine with other work, each doubt would have the second run time again.
    monkeypatch.setattr(precision, "DOUBTFUL", 2.0)
    monkeypatch.setattr(stored_costs, "is_doubtful", lambda _: False)
    monkeypatch.setattr(engine, "doubt_times", lambda *_: None)
    notes = [drafted().err for _ in range(2)]
    assert ["timing steps on this machine" in note for note in notes] == [True, False]


def _answer(cli: Cli, folder: Path, *options: object) -> tuple[int, list[int]]:
    """The number of tokens of a prompt by its template, and the tokens after it."""
    arguments = ("--drafter", "none", "-m", 8, "--json", "-p", "Hi", *options)
    values = json.loads(cli("generate", "--model", folder, *arguments).out)
    return values["prompt_tokens"], values["tokens"]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ([], "[user]Hi[assistant]"),
        (["--system-prompt", "Be good"], "[system]Be good[user]Hi[assistant]"),
        (["--chat-template-config", '{"tone": "kind"}'], "[user]Hi[assistant]kind"),
        (["--ignore-chat-template"], "Hi"),
    ],
    ids=str,
)
def test_chat_template(stories, chat_folder, cli, options, prompt):
    encoded = stories.tokenizer.encode(prompt, add_special_tokens=prompt == "Hi")
    expected = (len(encoded), ids(stock_tokens(stories.model, encoded, 8)))
    assert _answer(cli, chat_folder, *options) == expected


def _write_cache(trained: Trained, prompt: list[int], path: Path, model: Path) -> None:
    """What ``mlx_lm.cache_prompt`` does."""
    cache = make_prompt_cache(trained.model)
    list(generate_step(mx.array(prompt), trained.model, max_tokens=0, prompt_cache=cache))
    save_prompt_cache(str(path), cache, {"model": str(model), "tokenizer_config": "{}"})


def test_prompt_cache_files(stories, drafted, chat_folder, cli, tmp_path):
    """That of a chat leaves out the template's beginning."""
    encode, path = stories.tokenizer.encode, tmp_path / "cache.safetensors"
    start, question = encode("Once upon a"), encode(" time")
    expected = ids(stock_tokens(stories.model, [*start, *question], 20))
    _write_cache(stories, start, path, stories.folder)
    for drafter in ([], ["--drafter", "none"]):
        result = drafted("--json", "--prompt-cache-file", path, *drafter, prompt=" time")
        values = json.loads(result.out)
        assert (values["tokens"], values["prompt_tokens"]) == (expected, len(question))
    start = encode("[user]Once", add_special_tokens=False)
    question = encode("Hi[assistant]", add_special_tokens=False)
    expected = ids(stock_tokens(stories.model, [*start, *question], 8))
    _write_cache(stories, start, path, chat_folder)
    found = _answer(cli, chat_folder, "--prompt-cache-file", path)
    assert found == (len(question), expected)


def test_the_installed_command(stories, drafter_folder):
    """One real process: what a shell sees."""
    command = shutil.which("redrafter-mlx", path=str(Path(sys.executable).parent))
    # With a width, so that drafts are not timed.
    words = ["generate", stories.folder, "--drafter", drafter_folder, "--beam-width", "2"]
    words += ["-p", PROMPT, "-m", "20", "--stats"]
    done = subprocess.run([command, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, _stock_text(stories) + "\n"), done.stderr
    assert "Speculative: " in done.stderr


def test_version_help_and_interrupts(cli, plain, monkeypatch):
    assert cli("--version") == (0, f"{__version__}\n", "")
    nothing = cli()
    assert (nothing.code, nothing.err) == (2, "")
    assert "Usage: redrafter-mlx" in nothing.out
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("mlx_redrafter.engine.generation.stream_generate", interrupt)
    assert plain()[:2] == (130, "")


def test_grammars(plain, tmp_path):
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}')
    rules.write_text('start: "a" | "b"', encoding="utf-8-sig")
    found = plain("--json", "--json-schema", schema, "--max-tokens", 60)
    assert set(json.loads(json.loads(found.out)["text"])) <= {1, 2}
    assert json.loads(plain("--json", "--lark", rules).out)["text"] in ("a", "b")
    assert json.loads(plain("--json", "--regex", "[cd]{3}").out)["text"].strip("cd") == ""
    rules.write_text("start: missing")
    for bad, message in (
        (["--lark", rules], "grammar cannot be used"),
        (["--lark", tmp_path / "none"], "No such file"),
        (["--regex", "("], "regex parse error: unclosed group; correct or simplify it"),
        (["--regex", "a", "--lark", rules], "--regex and --lark cannot be combined"),
    ):
        found = plain(*bad)
        assert (found.code, message in found.err) == (2, True), found.err

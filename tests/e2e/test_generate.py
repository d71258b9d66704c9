"""``redrafter-mlx generate``: text, statistics, JSON, prompts, templates and caches."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from mlx_redrafter import __version__, load
from mlx_redrafter.engine import engine, stored_costs
from mlx_redrafter.proposers.redrafter import precision
from tests.conftest import Trained
from tests.helpers.cli import run
from tests.helpers.equality import ids, stock_tokens

PROMPT = "Once upon a time"

FIELDS: dict[str, Any] = {
    "text": str,
    "tokens": list,
    "prompt_tokens": int,
    "generation_tokens": int,
    "steps": int,
    "tokens_per_step": float,
    "acceptance_rate_by_depth": list,
    "prompt_tps": float,
    "generation_tps": float,
    "peak_memory": float,
    "finish_reason": str,
    "beam_width": int,
    "beam_length": int,
    "tree_nodes": int,
    "select": str,
    "seed": int,
}


def _options(stories: Trained, drafter: Path | None, prompt: str = PROMPT) -> list[object]:
    drafting = ["--drafter", "none"] if drafter is None else ["--drafter", drafter]
    return ["generate", "--model", stories.folder, *drafting, "--prompt", prompt, "-m", 20]


def _stock_text(stories: Trained, prompt: str = PROMPT, max_tokens: int = 20) -> str:
    return mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "shape",
    [[], ["--beam-width", 2, "--beam-length", 3, "--tree-nodes", 4], ["--select", "beam"]],
    ids=str,
)
def test_text_goes_to_stdout_and_statistics_to_stderr(
    stories: Trained,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    shape: list[object],
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), *shape, "--stats")
    assert result.code == 0
    assert result.out == _stock_text(stories) + "\n"
    lines = result.err.splitlines()
    assert lines[0] == "=========="
    assert lines[1].startswith("Prompt: 5 tokens, ")
    assert lines[2].startswith("Generation: 20 tokens, ")
    assert lines[3].startswith("Peak memory: ")
    assert lines[4].startswith("Speculative: 1.")
    assert "tokens/step over" in lines[4]
    assert len(lines) == 5


def test_one_token_has_no_speed(stories: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, *_options(stories, None), "-m", 1, "--stats")
    assert result.err.splitlines()[2] == "Generation: 1 token, in the time of the prompt"
    assert (
        json.loads(run(capsys, *_options(stories, None), "-m", 1, "--json").out)["generation_tps"]
        is None
    )


def test_half_precision_on_a_cpu_is_told(
    stories: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    shutil.copytree(stories.folder, half)
    tensors = mx.load(str(half / "model.safetensors"))
    cast = {name: tensor.astype(mx.float16) for name, tensor in tensors.items()}
    mx.save_safetensors(str(half / "model.safetensors"), cast, {"format": "mlx"})
    for folder, is_told in ((half, "cpu" in str(mx.default_device())), (stories.folder, False)):
        result = run(capsys, "generate", folder, "--prompt", PROMPT, "-m", 2)
        assert ("mlx_lm.convert --dtype float32" in result.err) == is_told, result.err


def test_drafts_made_ahead_change_no_text(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--predraft", 4, "--beam-width", 2, "--temp", 0, "--stats")
    result = run(capsys, *_options(stories, drafter_folder), *options)
    assert (result.code, result.out) == (0, _stock_text(stories) + "\n")
    assert "results were foreseen" in result.err.splitlines()[5]


def test_plain_decoding_prints_the_same_text_and_no_speculation(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, None), "--stats")
    assert (result.code, result.out) == (0, _stock_text(stories) + "\n")
    assert "Speculative" not in result.err
    assert run(capsys, *_options(stories, None)).err == ""


def test_json_has_every_field_and_nothing_else_is_printed(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), "--json", "--beam-width", 4)
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out)
    assert {name: type(value) for name, value in values.items()} == FIELDS
    assert values["text"] == _stock_text(stories)
    prompt: list[int] = stories.tokenizer.encode(PROMPT)
    assert values["tokens"] == ids(stock_tokens(stories.model, prompt, 20))
    assert values["prompt_tokens"] == len(prompt)
    assert values["generation_tokens"] == 20
    assert values["tokens_per_step"] == pytest.approx(19 / values["steps"])
    assert values["finish_reason"] == "length"
    assert values["beam_width"] == 4
    assert values["beam_length"] == 5
    assert values["tree_nodes"] == 9
    assert values["select"] == "top_n"


def test_json_says_that_shapes_were_chosen_step_by_step(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(run(capsys, *_options(stories, drafter_folder), "--json").out)
    assert values["text"] == _stock_text(stories)
    assert [values[name] for name in ("beam_width", "beam_length", "tree_nodes")] == ["auto"] * 3


def test_json_of_plain_decoding_has_no_shape(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(run(capsys, *_options(stories, None), "--json").out)
    assert values.keys() == FIELDS.keys()
    assert values["tokens_per_step"] == 1.0
    assert values["acceptance_rate_by_depth"] == []
    shape = {values[name] for name in ("beam_width", "beam_length", "tree_nodes", "select")}
    assert shape == {None}


def test_json_of_merged_beams_has_no_node_count(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*_options(stories, drafter_folder), "--select", "beam", "--json"]
    values = json.loads(run(capsys, *options).out)
    assert (values["tree_nodes"], values["select"]) == (None, "beam")


@pytest.mark.parametrize("drafts", [False, True])
def test_stop_token_is_counted_and_not_listed(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str], drafts: bool
) -> None:
    prompt: list[int] = stories.tokenizer.encode(PROMPT)
    tokens = ids(stock_tokens(stories.model, prompt, 20))
    stop = tokens[6]
    options = _options(stories, drafter_folder if drafts else None)
    result = run(capsys, *options, "--json", "--extra-eos-token", stop)
    values = json.loads(result.out)
    end = tokens.index(stop)
    assert values["finish_reason"] == "stop"
    assert values["tokens"] == tokens[:end]
    assert values["generation_tokens"] == end + 1


def test_one_token_has_no_rate(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*_options(stories, drafter_folder), "-m", 1]
    values = json.loads(run(capsys, *options, "--json").out)
    assert (values["steps"], values["tokens_per_step"]) == (0, None)
    assert "Speculative" not in run(capsys, *options, "--stats").err


def test_same_seed_same_text(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = ["--temp", 1, "--top-p", 0.95, "--top-k", 50, "--min-p", 0.01, "--json"]
    options = [*_options(stories, drafter_folder), *sampling]
    first, second, third = (
        json.loads(run(capsys, *options, "--seed", seed).out) for seed in (5, 5, 6)
    )
    plain = json.loads(run(capsys, *_options(stories, None), *sampling, "--seed", 5).out)
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert first["tokens"] != third["tokens"]
    assert first["seed"] == 5


def test_a_fresh_seed_is_reported_and_repeats_the_text(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*_options(stories, None), "--temp", 1, "--json"]
    first, second = (json.loads(run(capsys, *options).out) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(run(capsys, *options, "--seed", first["seed"]).out)
    assert again["tokens"] == first["tokens"]


def test_quantised_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--prompt", PROMPT, "--json", "--max-tokens", 40]
    result = run(capsys, *options, "--kv-bits", 4, "--quantized-kv-start", 10)
    assert result.code == 0, result.err
    model, tokenizer, _ = load()
    prompt = tokenizer.encode(PROMPT)
    stock = stock_tokens(model, prompt, 40, kv_bits=4, quantized_kv_start=10)
    assert json.loads(result.out)["tokens"] == ids(stock)
    result = run(capsys, *options, "--kv-bits", 9)
    assert (result.code, result.out) == (2, "")
    assert "kv_bits must be 1, 2, 3, 4, 5, 6 or 8, got 9" in result.err


def test_prompt_from_stdin(
    stories: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    result = run(capsys, *_options(stories, None, "-"))
    assert result.out == _stock_text(stories) + "\n"


def test_escapes_in_a_prompt_are_line_breaks_and_tabs(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, None, "Lily\\nand\\tTom"))
    assert result.out == _stock_text(stories, "Lily\nand\tTom") + "\n"


def test_draft_model_is_an_alias(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "--model", stories.folder, "--draft-model", drafter_folder]
    result = run(capsys, *options, "-p", PROMPT, "--max-tokens", 20)
    assert result.out == _stock_text(stories) + "\n"


def test_verbose_says_what_is_drafted_and_the_seed(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*_options(stories, drafter_folder), "--verbose", "--seed", 7]
    result = run(capsys, *options, "--beam-width", 4)
    assert "Seed: 7." in result.err
    assert "beam_width=4" in result.err
    assert result.out == _stock_text(stories) + "\n"


def test_verbose_says_why_shapes_were_chosen(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), "--verbose", "--max-tokens", 40)
    heading = next(i for i, line in enumerate(result.err.splitlines()) if "ms/step" in line)
    rows = result.err.splitlines()[heading + 1 :]
    assert rows[0].startswith("nothing ")
    assert len(rows) > 1
    assert sum(int(row[19:25]) for row in rows) == _steps(result.err)


def test_the_first_run_says_what_it_waits_for(
    stories: Trained,
    drafter_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine, "step_costs", stored_costs.step_costs)  # the real ones
    # On a machine with other work, each doubt would have the second run time again.
    monkeypatch.setattr(precision, "DOUBTFUL", 2.0)
    monkeypatch.setattr(stored_costs, "is_doubtful", lambda _: False)
    monkeypatch.setattr(engine, "doubt_times", lambda *_: None)
    notes = [run(capsys, *_options(stories, drafter_folder)).err for _ in range(2)]
    assert ["timing steps on this machine" in note for note in notes] == [True, False]


def _steps(statistics: str) -> int:
    found = re.search(r"over (\d+) steps", statistics)
    assert found is not None
    return int(found[1])


def _prompt_tokens(
    capsys: pytest.CaptureFixture[str], folder: Path, *options: object
) -> tuple[int, list[int]]:
    arguments = ["generate", "--model", folder, "--drafter", "none", "-m", 8, "--json", *options]
    values = json.loads(run(capsys, *arguments).out)
    return values["prompt_tokens"], values["tokens"]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ([], "[user]Hi[assistant]"),
        (["--system-prompt", "Be good"], "[system]Be good[user]Hi[assistant]"),
        (["--chat-template-config", '{"tone": "kind"}'], "[user]Hi[assistant]kind"),
    ],
    ids=str,
)
def test_chat_template(
    stories: Trained,
    chat_folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    prompt: str,
) -> None:
    encoded: list[int] = stories.tokenizer.encode(prompt, add_special_tokens=False)
    found = _prompt_tokens(capsys, chat_folder, "-p", "Hi", *options)
    assert found == (len(encoded), ids(stock_tokens(stories.model, encoded, 8)))


def test_chat_template_can_be_ignored(
    stories: Trained, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded: list[int] = stories.tokenizer.encode("Hi")
    found = _prompt_tokens(capsys, chat_folder, "-p", "Hi", "--ignore-chat-template")
    assert found == (len(encoded), ids(stock_tokens(stories.model, encoded, 8)))


def _write_cache(trained: Trained, prompt: list[int], path: Path, model: str) -> None:
    """What ``mlx_lm.cache_prompt`` does."""
    cache = make_prompt_cache(trained.model)
    for _ in generate_step(
        mx.array(prompt),
        trained.model,
        max_tokens=0,
        prompt_cache=cache,
    ):
        pass
    save_prompt_cache(str(path), cache, {"model": model, "tokenizer_config": "{}"})


@pytest.mark.parametrize("drafts", [False, True])
def test_prompt_cache_file(
    stories: Trained,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    drafts: bool,
) -> None:
    start: list[int] = stories.tokenizer.encode("Once upon a")
    _write_cache(stories, start, tmp_path / "cache.safetensors", str(stories.folder))
    options = _options(stories, drafter_folder if drafts else None, " time")
    result = run(capsys, *options, "--json", "--prompt-cache-file", tmp_path / "cache.safetensors")
    question: list[int] = stories.tokenizer.encode(" time")
    expected = ids(stock_tokens(stories.model, [*start, *question], 20))
    assert json.loads(result.out)["tokens"] == expected
    assert json.loads(result.out)["prompt_tokens"] == len(question)


def test_prompt_cache_file_of_a_chat_leaves_out_the_templates_beginning(
    stories: Trained, chat_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = stories.tokenizer
    start: list[int] = tokenizer.encode("[user]Once", add_special_tokens=False)
    _write_cache(stories, start, tmp_path / "cache.safetensors", str(chat_folder))
    count, tokens = _prompt_tokens(
        capsys, chat_folder, "-p", "Hi", "--prompt-cache-file", tmp_path / "cache.safetensors"
    )
    question: list[int] = tokenizer.encode("Hi[assistant]", add_special_tokens=False)
    assert count == len(question)
    assert tokens == ids(stock_tokens(stories.model, [*start, *question], 8))


def test_the_installed_command(stories: Trained, drafter_folder: Path) -> None:
    """One real process: what a shell sees."""
    command = shutil.which("redrafter-mlx", path=str(Path(sys.executable).parent))
    assert command is not None
    options = [str(option) for option in _options(stories, drafter_folder)]
    options += ["--beam-width", "2"]  # without timing how long drafts take
    done = subprocess.run([command, *options, "--stats"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == _stock_text(stories) + "\n"
    assert b"Speculative: " in done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")
    for arguments in (["--help"], ["generate", "--help"], ["check", "--help"]):
        result = run(capsys, *arguments)
        assert result.code == 0
        assert "Usage: redrafter-mlx" in result.out


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys)
    assert (result.code, result.err) == (2, "")
    assert "Usage: redrafter-mlx" in result.out


def test_interrupt_ends_with_130(
    stories: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_redrafter.engine.generation.stream_generate", interrupt)
    result = run(capsys, *_options(stories, None))
    assert (result.code, result.out) == (130, "")


def test_grammars(stories: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}')
    rules.write_text('start: "a" | "b"')
    options = [*_options(stories, None), "--json"]
    found = run(capsys, *options, "--json-schema", schema, "--max-tokens", 60)
    assert set(json.loads(json.loads(found.out)["text"])) <= {1, 2}
    assert json.loads(run(capsys, *options, "--lark", rules).out)["text"] in ("a", "b")
    assert json.loads(run(capsys, *options, "--regex", "[cd]{3}").out)["text"].strip("cd") == ""
    rules.write_text("start: missing")
    for bad, message in (
        (["--lark", rules], "grammar cannot be used"),
        (["--lark", tmp_path / "none"], "No such file"),
        (["--regex", "a", "--lark", rules], "--regex and --lark cannot be combined"),
    ):
        found = run(capsys, *options, *bad)
        assert (found.code, message in found.err) == (2, True), found.err

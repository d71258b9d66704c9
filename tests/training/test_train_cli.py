"""`redrafter-mlx train`: from files to a drafter that generates, and one line for what is wrong."""

import json
import re
import runpy
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
import pytest

from mlx_redrafter.checkpoint_files import named_parameters, read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.cli.train import ConsoleReporter, to_use
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.fit import TOP_TOKENS
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.training import (
    DataOptions,
    NetworkOptions,
    TrainingOptions,
    preparation,
    resources,
    train_drafter,
)
from mlx_redrafter.training.files import load_arrays, locking
from mlx_redrafter.training.students.student import simulate
from mlx_redrafter.training.teacher import TOP_K
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.training_request import CACHE_FOLDER, TrainingRequest
from tests.helpers.cli import Cli, Result
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.models import ROOT, random_drafter, shared_path
from tests.models.tiny_models import WINDOW, build, tiny_config, windowed_config
from tests.training.conftest import check_drafts, curve_of
from tests.training.pieces import Silent


@pytest.fixture
def model() -> Path:
    return shared_path("models/stories260k")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "drafter"


@pytest.fixture
def train(model: Path, out: Path, cli: Cli) -> Cli:
    """A function that trains for the model on some texts, with further options."""
    path = out.with_name("texts.jsonl")
    text = "Once upon a time there were {} little cats in a big house."
    rows = [{"text": text.format(word)} for word in ("two", "three", "four", "five", "six")]
    path.write_text("\n".join(map(json.dumps, rows)))
    return partial(cli, "train", "--out", out, "--model", model, "--data", path)


def test_the_folder_is_a_drafter_with_a_card(finished, cli, model):
    out = finished.request.out
    card = (out / "README.md").read_text()
    values = read_config(out)
    assert values["target"]["fingerprint"] in card
    # A card that is shared tells no paths.
    assert "/" not in values["target"]["name"]
    assert f"# Drafter for {values['target']['name']}" in card
    simulated = values["simulated"]
    assert simulated["length"] == 5
    assert f"| chain of 4 | {simulated['tokens_per_step']:.2f} |" in card
    assert "stories.txt" in card
    assert f"noise share {values['noise_share']:g}" in card
    rates = curve_of(out)
    assert len(rates) == 4
    assert rates[-1] > 1.3
    assert check_drafts(cli, model, out, "The")["tokens_per_step"] > 1.3


def test_the_texts_that_the_card_reports_on_have_chosen_nothing(finished):
    options, folder = finished.request.data_options, finished.request.out / CACHE_FOLDER
    arrays, _ = load_arrays(folder / "held-out-00000.safetensors")
    texts = list(Shard(**arrays).texts())
    student, stats = finished.result.student, finished.result.measured
    half = simulate(student, texts[options.held_out // 2 :], 5, options.temp)
    assert (stats.num_tokens, stats.steps) == (half.num_tokens, half.steps)
    assert "Simulated on 4 of 8 texts" in (finished.request.out / "README.md").read_text()


def test_held_out_texts_keep_what_calibration_looks_at(finished):
    folder = finished.request.out / CACHE_FOLDER
    train, held_out = (
        mx.load(str(folder / f"{part}-00000.safetensors"))["top_ids"]
        for part in ("train", "held-out")
    )
    vocab_size = read_config(finished.request.out)["vocab_size"]
    assert train.shape[1] == TOP_K
    assert held_out.shape[1] == min(TOP_TOKENS, vocab_size) > train.shape[1]


def test_stages_are_reported(finished):
    generating = ["generating training text", "generating held-out text"]
    stages = ["rehearsal", "reading text", *generating, "evaluation", "training"]
    assert finished.reporter.stages == stages
    needs, time = finished.reporter.lines[:2]
    sizes = r"B of disk \(the model's outputs .*B, the drafter .*B\), .*B of memory"
    assert re.fullmatch(rf"needs about [\d,]+ tokens, .*{sizes}", needs)
    stages = "reading .*, generating .*, training .*, evaluation .*"
    assert re.fullmatch(rf"needs about .*: {stages}", time)


def test_a_full_cache_costs_no_time(finished, tmp_path):
    request, reporter = finished.request, Silent()
    options = {"network": NetworkOptions("medusa"), "dry_run": True, "cache": request.cache_folder}
    train_drafter(replace(request, out=tmp_path, **options), reporter)
    assert re.fullmatch(r"needs about .*: training .*, evaluation .*", reporter.lines[1])


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(train, out):
    result = train("--dry-run")
    assert result.code == 0
    needs, rehearsal, duration = result.err.splitlines()
    assert needs.startswith("needs about")
    assert rehearsal == "rehearsal: 4 of 4"
    assert duration.startswith("needs about")
    assert not out.exists()


def test_minutes_are_for_the_whole_run(train, out):
    result = train("--minutes", 1e-4)
    assert result.code == 1
    assert "--minutes 0.0001 is for the whole run, of which too little is left" in result.err
    assert not out.exists()
    start = time.monotonic()
    result = train("--answer-tokens", 24, "--minutes", 0.15)
    assert result.code == 0
    assert "needs about 9 s: " in result.err
    assert 3 < time.monotonic() - start < 120  # 9 on an idle machine


def test_a_run_that_was_interrupted_is_continued_with_resume_alone(train, out, cli):
    """The second one is interrupted while the target writes, long before the first step."""
    with _interrupting("training"):
        result = train("--answer-tokens", 24, "--epochs", 400)
    assert result.code == 130
    assert f"continue with: redrafter-mlx train --out {out} --resume" in result.err
    assert "continue it with --resume" in _refusal(train())
    other = _refusal(cli("train", "--out", out, "--resume", "--epochs", 2))
    assert "was begun with epochs 400, not 2" in other
    for form in (["other"], ["--model", "other"]):
        assert "was begun with model " in _refusal(cli("train", *form, "--out", out, "--resume"))
    second = ("--out", out.with_name("second"))
    with patch.object(preparation, "build_corpus", side_effect=KeyboardInterrupt):
        assert train(*second, "--answer-tokens", 24, "--epochs", 1).code == 130
    begun = (second[1] / "run.json").read_bytes()
    again = _refusal(train(*second, "--answer-tokens", 32))
    assert f"a run was begun in {second[1]}; continue it with --resume" in again
    assert (second[1] / "run.json").read_bytes() == begun
    assert cli("train", *second, "--resume").code == 0
    assert json.loads((second[1] / "run.json").read_text())["answer_tokens"] == 24


def test_commands_to_copy_name_all_that_they_need(train, tmp_path):
    out = tmp_path / "my drafter"
    with _interrupting("reading text"):
        stopped = train("--out", out, "--answer-tokens", 24)
    assert stopped.code == 130
    command = stopped.err.splitlines()[-1].partition("continue with: ")[2]
    assert shlex.split(command) == ["redrafter-mlx", "train", "--out", str(out), "--resume"]
    adapter = tmp_path / "adapter"
    request = TrainingRequest("a model", out, adapter_path=adapter, trust_remote_code=True)
    words = shlex.split(to_use(request))
    assert words[:4] == ["redrafter-mlx", "generate", "--model", "a model"]
    assert words[4:7] == ["--adapter-path", str(adapter), "--trust-remote-code"]
    assert words[7:] == ["--drafter", str(out)]


def test_a_run_is_continued_from_another_working_folder(train, out, cli, model, monkeypatch):
    assert train is not None, "it has written the texts"
    monkeypatch.chdir(out.parent)
    texts = ("--data", "texts.jsonl", "--cache", "outputs", "--answer-tokens", 24)
    with _interrupting("reading text"):
        assert cli("train", "--out", out, "--model", model, *texts).code == 130
    monkeypatch.chdir(out)
    assert cli("train", "--out", out, "--resume", "--dry-run").code == 0
    assert json.loads((out / "run.json").read_text())["cache"] == str(out.parent / "outputs")


EDITED = r"expected a .*text.* as {} in .*; correct it, or choose"
UNKNOWN = "run.json, found {}; finish the run with the version"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"fused": True, "epochs": 3}, UNKNOWN.format("fused")),  # of another version
        # A record cannot say that a model's own code is run, either.
        ({"trust_remote_code": True}, UNKNOWN.format("trust_remote_code")),
        ({"data": "texts"}, EDITED.format("data")),
        ({"prompts": [3]}, EDITED.format("prompts")),
        ({"model": 4}, EDITED.format("model")),
    ],
)
def test_what_a_record_cannot_have_is_named(tmp_path, cli, record, message):
    (tmp_path / "run.json").write_text(json.dumps({"model": "any/model", **record}))
    assert re.search(message, _refusal(cli("train", "--out", tmp_path, "--resume")))


@contextmanager
def _interrupting(stage: str) -> Iterator[None]:
    """Raise what Ctrl-C raises in a stage; in the background a suite ignores Ctrl-C."""

    def progress(reporter: ConsoleReporter, now: str, done: int, total: int | None) -> None:
        if now == stage and done:
            raise KeyboardInterrupt

    with patch.object(ConsoleReporter, "progress", progress):
        yield


def _refusal(result: Result) -> str:
    assert result.code in (1, 2)
    assert not result.out
    assert result.err.count("\n") == 1
    return result.err


def test_refusals_are_one_line(train, out, cli, finished, model):
    missing, earlier = out.with_name("none.txt"), finished.request.out
    quantised = load_drafter(earlier)
    quantize_drafter(quantised, 8, 32)
    save_drafter(quantised, out.with_name("quantised"))
    save_drafter(random_drafter(64, 16, exit_dim=16), out.with_name("other"))
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--model", missing.with_suffix("")), "no such folder"),
        (("--data", missing), "No such file or directory; choose another path"),
        (("--recipe", "magic"), "is not one of 'soft', 'coupled', 'overlap', 'apple'"),
        (("--length", 1), "length must be an integer from 2 to 16"),
        (("--self-generated", 2), "self_generated must be a number from 0 to 1"),
        (("--lr", "nan"), "lr must be a number"),
        (("--lr", 0), "lr must be a number"),
        (("--epochs", 0), "epochs must be an integer at least 1"),
        (("--tokens", 0), "tokens must be"),
        (("--tokens", 10**13, "--self-generated", 1), "of disk in"),
        (("--cache", earlier / CACHE_FOLDER), "was made with another"),
        (("--start-from", missing.with_suffix("")), "no such folder"),
        (("--start-from", earlier, "--exit-dim", 64), "keeps its shape"),
        (("--start-from", out.with_name("quantised")), "is quantised"),
        (("--start-from", out.with_name("other")), "does not match the target's"),
        (("--start-from", model), "drafter to start from, found draft model"),
        (("--start-from", "smollm2-135m-instruct"), "is quantised"),
    ]
    for arguments, message in cases:
        assert message in _refusal(train(*arguments))
    no_target = cli("train", "--out", out, "--data", out.with_name("texts.jsonl"))
    assert "expected a model, found none" in _refusal(no_target)
    with locking(out):
        assert f"another run trains in {out}; wait for its end" in _refusal(train())
    assert not (out / "model.safetensors").exists()


def test_what_does_not_fit_into_memory(train, monkeypatch):
    monkeypatch.setattr(resources, "read_total_memory", lambda: 2**30)
    assert "of memory, of 1.07 GB 85% can be used" in _refusal(train())
    monkeypatch.setattr(resources, "read_total_memory", lambda: None)  # the system does not say
    assert train("--answer-tokens", 8, "--epochs", 1, "--exit-dim", 16).code == 0


def test_a_reduced_head_drafts_all_tokens(train, out, cli, model):
    parts = ("--self-generated", 0, "--recipe", "apple", "--draft-vocab", 90)
    assert train("--answer-tokens", 32, "--epochs", 2, *parts).code == 0
    card = (out / "README.md").read_text()
    assert "90 tokens" in card
    assert " 0 self-generated by the target" in card
    check_drafts(cli, model, out, "Once", "--max-tokens", 40)


def test_prompts_are_answered_by_the_target_and_too_few_are_said(out, cli, model):
    prompts = out.with_name("prompts.txt")
    prompts.write_text("One day\nThe dog\n")
    options = ("--answer-tokens", 8, "--epochs", 1, "--tokens", 500, "--recipe", "coupled")
    result = cli("train", "--model", model, "--prompts", prompts, "--out", out, *options)
    assert "128 tokens for training, not 500, as prompts and texts are few (1)" in result.err
    card = (out / "README.md").read_text()
    assert "0 given, 128 self-generated by the target" in card
    assert "the same Gumbel noise" in card


def test_going_on_from_an_earlier_drafter(train, out, finished):
    earlier = finished.request.out
    result = train("--start-from", earlier, "--answer-tokens", 24, "--epochs", 1)
    assert result.code == 0, result.err
    assert f"| started from | `{earlier.name}` |" in (out / "README.md").read_text()
    # It begins with what the earlier one knows: a new one drafts next to nothing at step 0.
    begun, new = (curve_of(folder)[0] for folder in (out, earlier))
    assert begun > new + 0.2
    shapes = [read_config(folder) for folder in (earlier, out)]
    assert shapes[0]["exit_dim"] == shapes[1]["exit_dim"]


def test_a_draft_model_from_the_cache_of_a_run(finished, tmp_path, model, monkeypatch, cli):
    """By ``bench/lab/pair/draft_model.py``."""
    script, out = ROOT / "bench" / "lab" / "pair" / "draft_model.py", tmp_path / "draft-model"
    words = ["--target", model, "--cache", finished.request.cache_folder, "--out", out]
    sizes = ["--hidden", 32, "--layers", 1, "--lr", 0.01]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, [*words, *sizes])])
    runpy.run_path(str(script), run_name="__main__")
    values = check_drafts(cli, model, out, "Once upon", "--max-tokens", 40, "--beam-width", 1)
    assert values["tokens_per_step"] > 1.02


# Targets whose layers have windows, chunks or states

PROMPTS = ["One day a cat met a big red dog", "Tom and Sue", "In the park", "The sun"]


def save_target(model_type: str, folder: Path) -> None:
    """Write a random model that has such layers, and the tokenizer of the bundled one."""
    source = find_bundled("target")
    shutil.copytree(source, folder)
    known = read_config(source)
    make = tiny_config if model_type == "qwen3_5" else windowed_config
    config = {**make(model_type), "eos_token_id": known["eos_token_id"]}
    inner = config.get("text_config", config)
    inner |= {"vocab_size": known["vocab_size"], "max_position_embeddings": 512}
    if model_type == "qwen3_5":
        inner["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    weights = named_parameters(build(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


@pytest.mark.parametrize(
    ("model_type", "epochs", "least"),
    [("gemma3_text", 60, 1.5), ("llama4", 2, 1), ("qwen3_5", 2, 1)],
)
def test_from_training_to_drafted_text(model_type, epochs, least, tmp_path, cli):
    target, out, file = (tmp_path / name for name in ("target", "drafter", "prompts.txt"))
    save_target(model_type, target)
    file.write_text("\n".join(PROMPTS))
    network = NetworkOptions(exit_dim=64, layers=1)
    data = DataOptions(answer_tokens=4 * WINDOW, sequence_length=8 * WINDOW, temp=0)
    training = TrainingOptions(epochs=epochs, batch_tokens=64, num_evaluations=1)
    options: Any = {"data_options": data, "network": network, "training": training}
    request = TrainingRequest(str(target), out, prompts=[file], **options)
    assert train_drafter(request, Silent()) is not None
    found = check_drafts(cli, target, out, PROMPTS[0], "--max-tokens", 40)
    model, tokenizer, *_ = mlx_lm.load(str(target))
    prompt = tokenizer.encode(PROMPTS[0])
    assert len(prompt) > WINDOW
    assert found["tokens"] == ids(stock_tokens(model, prompt, 40))
    assert found["tokens_per_step"] >= least

"""`redrafter-mlx train`: from files to a drafter that generates, and one line for what is wrong."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.cli.train import ConsoleReporter
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.fit import TOP_TOKENS
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.training import preparation, resources
from mlx_redrafter.training.teacher import TOP_K
from mlx_redrafter.training.training_request import CACHE_FOLDER
from tests.helpers.cli import Cli, Result
from tests.helpers.models import random_drafter, shared_model
from tests.training.conftest import Run, curve_of


def _train(cli: Cli, out: Path, *arguments: object) -> Result:
    return cli("train", "--out", out, *arguments)


@pytest.fixture
def model() -> Path:
    return shared_model("stories260k")


@pytest.fixture
def fine(model: Path, tmp_path: Path) -> tuple[object, ...]:
    """Arguments with which a run does its work: the model and texts."""
    path = tmp_path / "texts.jsonl"
    text = "Once upon a time there were {} little cats in a big house."
    rows = [{"text": text.format(word)} for word in ("two", "three", "four", "five", "six")]
    path.write_text("\n".join(map(json.dumps, rows)))
    return "--model", model, "--data", path


def test_the_folder_is_a_drafter_with_a_card(finished: Run, cli: Cli, model: Path) -> None:
    out = finished.request.out
    card = (out / "README.md").read_text()
    values = json.loads((out / "config.json").read_text())
    assert values["target"]["fingerprint"] in card
    # A card that is shared tells no paths.
    assert "/" not in values["target"]["name"]
    assert f"# Drafter for {values['target']['name']}" in card
    assert "| chain of 4 |" in card
    assert "stories.txt" in card
    assert f"noise share {values['noise_share']:g}" in card
    rates = curve_of(out)
    assert len(rates) == 4
    assert rates[-1] > 1.3
    prompt = ("--model", model, "--prompt", "The", "--json")
    plain = cli("generate", *prompt, "--drafter", "none")
    drafted = cli("generate", *prompt, "--drafter", out, "--beam-width", 2)
    assert drafted.code == 0
    assert json.loads(drafted.out)["tokens"] == json.loads(plain.out)["tokens"]
    assert json.loads(drafted.out)["tokens_per_step"] > 1.3


def test_held_out_texts_keep_what_calibration_looks_at(finished: Run) -> None:
    folder = finished.request.out / CACHE_FOLDER
    train, held_out = (
        mx.load(str(folder / f"{part}-00000.safetensors"))["top_ids"]
        for part in ("train", "held-out")
    )
    vocab_size = json.loads((finished.request.out / "config.json").read_text())["vocab_size"]
    assert train.shape[1] == TOP_K
    assert held_out.shape[1] == min(TOP_TOKENS, vocab_size) > train.shape[1]


def test_stages_are_reported(finished: Run) -> None:
    assert finished.reporter.stages == [
        "rehearsal",
        "generating training text",
        "generating held-out text",
        "reading train text",
        "reading held-out text",
        "evaluation",
        "training",
    ]
    needs, time = finished.reporter.lines[:2]
    sizes = r"B of disk \(the model's outputs .*B, the drafter .*B\), .*B of memory"
    assert re.fullmatch(rf"needs about [\d,]+ tokens, .*{sizes}", needs)
    stages = "generating .*, reading .*, training .*, evaluation .*"
    assert re.fullmatch(rf"needs about .*: {stages}", time)


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(
    tmp_path: Path, cli: Cli, fine: tuple[object, ...]
) -> None:
    out = tmp_path / "drafter"
    result = _train(cli, out, *fine, "--dry-run")
    assert result.code == 0
    needs, rehearsal, duration = result.err.splitlines()
    assert needs.startswith("needs about")
    assert rehearsal == "rehearsal: 4 of 4"
    assert duration.startswith("needs about")
    assert not out.exists()


def test_minutes_are_for_the_whole_run(tmp_path: Path, cli: Cli, fine: tuple[object, ...]) -> None:
    result = _train(cli, tmp_path / "a", *fine, "--minutes", 1e-4)
    assert result.code == 1
    assert "--minutes 0.0001 is for the whole run, of which too little is left" in result.err
    assert not (tmp_path / "a").exists()
    start = time.monotonic()
    few = ("--answer-tokens", 24)
    result = _train(cli, tmp_path / "b", *fine, *few, "--minutes", 0.15)
    assert result.code == 0
    assert "needs about 9 s: " in result.err
    assert 3 < time.monotonic() - start < 120  # 9 on an idle machine


def test_a_small_run_interrupted_and_resumed(
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    fine: tuple[object, ...],
) -> None:
    out = tmp_path / "drafter"
    options = ("--answer-tokens", 24, "--epochs", 400)
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReporter, "progress", _interrupt_training)
        result = cli("train", *fine, "--out", out, *options)
    assert result.code == 130
    assert f"continue with: redrafter-mlx train --out {out} --resume" in result.err
    again = cli("train", *fine, "--out", out)
    assert again.code == 2
    assert "continue it with --resume" in again.err
    other = cli("train", "--out", out, "--resume", "--epochs", 2)
    assert other.code == 2
    assert "was begun with epochs 400, not 2" in other.err


def test_a_forgotten_resume_destroys_nothing(
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    fine: tuple[object, ...],
) -> None:
    out = tmp_path / "drafter"
    few = ("--answer-tokens", 24, "--epochs", 1)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # while the target writes, long before the first step
        patch.setattr(preparation, "build_corpus", interrupt)
        assert _train(cli, out, *fine, *few).code == 130
    begun = (out / "run.json").read_bytes()
    again = _train(cli, out, *fine, "--answer-tokens", 32)
    assert again.code == 2
    assert f"a run was begun in {out}; continue it with --resume" in again.err
    assert (out / "run.json").read_bytes() == begun
    assert _train(cli, out, "--resume").code == 0
    assert json.loads((out / "run.json").read_text())["answer_tokens"] == 24


def test_options_of_another_version_are_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run.json").write_text('{"fused": true, "epochs": 3}')
    result = _train(cli, tmp_path, "--resume")
    assert "run.json, found fused; finish the run with the version" in _refusal(result)


def _interrupt_training(reporter: ConsoleReporter, stage: str, done: int, _: int | None) -> None:
    """Raise what Ctrl-C raises after the first step; in the background a suite ignores Ctrl-C."""
    if stage == "training" and done:
        raise KeyboardInterrupt


def _refusal(result: Result) -> str:
    assert result.code in (1, 2)
    assert not result.out
    assert result.err.count("\n") == 1
    return result.err


def test_refusals_are_one_line(tmp_path: Path, cli: Cli, fine: tuple[object, ...]) -> None:
    out = tmp_path / "drafter"
    cases: list[tuple[tuple[object, ...], str]] = [
        (fine[2:], "expected a target, found none"),
        ((*fine, "--model", tmp_path / "none"), "no such folder"),
        ((*fine, "--data", tmp_path / "none.txt"), "cannot read"),
        ((*fine, "--recipe", "magic"), "is not one of 'soft', 'coupled', 'overlap', 'apple'"),
        ((*fine, "--length", 1), "length must be an integer from 2 to 16"),
        ((*fine, "--self-generated", 2), "self_generated must be a number from 0 to 1"),
        ((*fine, "--lr", "nan"), "lr must be a number"),
        ((*fine, "--epochs", 0), "epochs must be an integer at least 1"),
        ((*fine, "--tokens", 0), "tokens must be"),
    ]
    for arguments, message in cases:
        assert message in _refusal(_train(cli, out, *arguments))
    assert not (out / "model.safetensors").exists()


def test_what_does_not_fit_is_refused_before_it_starts(
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    fine: tuple[object, ...],
) -> None:
    out = tmp_path / "drafter"
    many = ("--tokens", 10**13, "--self-generated", 1)
    assert "of disk in" in _refusal(_train(cli, out, *fine, *many))
    monkeypatch.setattr(resources, "read_total_memory", lambda: 2**30)
    assert "of memory, of 1.07 GB 85% can be used" in _refusal(_train(cli, out, *fine))
    monkeypatch.setattr(resources, "read_total_memory", lambda: None)  # the system does not say
    few = ("--answer-tokens", 8, "--epochs", 1, "--exit-dim", 16)
    result = cli("train", *fine, "--out", out, *few)
    assert result.code == 0


def test_a_cache_of_another_run_is_refused_and_an_equal_one_shared(
    finished: Run, tmp_path: Path, cli: Cli, fine: tuple[object, ...]
) -> None:
    cache = finished.request.out / "cache"
    refusal = _refusal(_train(cli, tmp_path / "d", *fine, "--cache", cache))
    assert "was made with another" in refusal


def test_a_reduced_head_drafts_for_the_whole_vocabulary(
    tmp_path: Path, cli: Cli, fine: tuple[object, ...]
) -> None:
    out = tmp_path / "drafter"
    parts = ("--self-generated", 0, "--recipe", "apple", "--draft-vocab", 90)
    options = ("--answer-tokens", 32, "--epochs", 2, *parts)
    result = cli("train", *fine, "--out", out, *options)
    assert result.code == 0
    card = (out / "README.md").read_text()
    assert "90 tokens" in card
    assert " 0 self-generated by the target" in card
    prompt = (*fine[:2], "--prompt", "Once", "--max-tokens", 40, "--json")
    drafted = cli("generate", *prompt, "--drafter", out, "--beam-width", 2)
    plain = cli("generate", *prompt, "--drafter", "none")
    assert json.loads(drafted.out)["tokens"] == json.loads(plain.out)["tokens"]


def test_prompts_are_answered_by_the_target(tmp_path: Path, cli: Cli, model: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One day\nThe dog\nTom and Sue\nIn the park\n")
    out = tmp_path / "drafter"
    options = ("--answer-tokens", 16, "--epochs", 1, "--recipe", "coupled")
    result = cli("train", "--model", model, "--prompts", prompts, "--out", out, *options)
    assert result.code == 0
    assert "0 given, 96 self-generated by the target" in (out / "README.md").read_text()
    assert "the same Gumbel noise" in (out / "README.md").read_text()


def test_going_on_from_an_earlier_drafter(
    finished: Run, tmp_path: Path, cli: Cli, fine: tuple[object, ...]
) -> None:
    earlier, out = finished.request.out, tmp_path / "drafter"
    fine = (*fine, "--start-from", earlier)
    few = ("--answer-tokens", 24, "--epochs", 1)
    result = cli("train", *fine, "--out", out, *few)
    assert result.code == 0, result.err
    assert f"| started from | `{earlier.name}` |" in (out / "README.md").read_text()
    # It begins with what the earlier one knows: a new one drafts next to nothing at step 0.
    begun, new = (curve_of(folder)[0] for folder in (out, earlier))
    assert begun > new + 0.2
    shapes = [json.loads((folder / "config.json").read_text()) for folder in (earlier, out)]
    assert shapes[0]["exit_dim"] == shapes[1]["exit_dim"]


def test_drafters_that_cannot_be_gone_on_from_are_refused(
    finished: Run, tmp_path: Path, cli: Cli, fine: tuple[object, ...]
) -> None:
    earlier, out = finished.request.out, tmp_path / "drafter"
    quantised = load_drafter(earlier)
    quantize_drafter(quantised, 8, 32)
    save_drafter(quantised, tmp_path / "quantised")
    save_drafter(random_drafter(64, 16, exit_dim=16), tmp_path / "other")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--start-from", tmp_path / "none"), "no such folder"),
        (("--start-from", earlier, "--exit-dim", 64), "keeps its shape"),
        (("--start-from", tmp_path / "quantised"), "is quantised"),
        (("--start-from", tmp_path / "other"), "does not match the target's"),
    ]
    for arguments, message in cases:
        assert message in _refusal(_train(cli, out, *fine, *arguments))
    assert not (out / "model.safetensors").exists()

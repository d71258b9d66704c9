"""``redrafter-mlx try``: one text with drafts and by mlx-lm, with both speeds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.live_text import print_text
from mlx_redrafter.cli.model_options import AUTO, CONTEXT, Pair, Yes
from mlx_redrafter.cli.progress import note
from mlx_redrafter.cli.text_options import MaxTokens

if TYPE_CHECKING:
    from mlx_redrafter.bench.runs import Arm, TimedRun

# Maximum number of rounds: in each, the program generates the text once in both ways.
ROUNDS = 5
# Name of decoding with drafts.
DRAFTED = "with drafts"


def try_out(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model: a folder, a repository, or the last part of a repository's name. By "
            "default the bundled demonstration model.",
        ),
    ] = None,
    prompt: Annotated[str, "Prompt of the text.", "-p"] = "Once upon a time",
    max_tokens: MaxTokens = 100,
    yes: Yes = False,
) -> None:
    """Generate a text with drafts and by mlx-lm alone, and compare the texts and the speeds.

    The drafter is the one that --drafter auto would choose. The exit code is 1 if the texts differ.
    """
    check_int("max_tokens", max_tokens, 2)
    disturbance = _describe_load()  # to load the model keeps the cores busy, too
    pair = Pair() if model is None else Pair(model, AUTO, yes)
    target, tokenizer, drafter = pair.load(CONTEXT + max_tokens)
    if disturbance is not None:
        note(disturbance)

    from mlx_redrafter.bench.runs import (
        STOCK,
        CommonSettings,
        EncodedPrompt,
        Turn,
        drafted_arm,
        stock_arm,
    )
    from mlx_redrafter.bench.timing import rotated
    from mlx_redrafter.bench.turns import one_by_one
    from mlx_redrafter.engine.prompt_encoding import encode_question

    settings = CommonSettings(target, tokenizer, drafter, max_tokens)
    drafted = drafted_arm(settings, None)
    arms: dict[str, Arm] = {DRAFTED: partial(_print, drafted), STOCK: stock_arm(settings)}
    encoded = EncodedPrompt("", "", encode_question(tokenizer, prompt))
    end = time.perf_counter() + 20  # no further round begins then
    rounds: list[dict[str, TimedRun]] = []
    while len(rounds) < ROUNDS and (not rounds or time.perf_counter() < end):
        turn = Turn("", 0, encoded, len(rounds))
        found: dict[str, TimedRun] = {}
        for way in rotated(list(arms), len(rounds)):
            ((found[way], _),) = one_by_one(way, arms[way], [turn])
        rounds.append(found)
        arms[DRAFTED] = drafted
    if not _report([(one[DRAFTED], one[STOCK]) for one in rounds]):
        raise typer.Exit(1)


def _describe_load() -> str | None:
    """Describe the load by other programs, if they keep half of the cores busy or more."""
    from mlx_redrafter.bench.machine import load_averages

    cores, (load, *_) = os.cpu_count() or 1, load_averages() or [0.0]
    if load < cores / 2:
        return None
    return f"other programs keep {load:.1f} of {cores} cores busy, which disturbs the speeds"


def _print(arm: Arm, ids: list[int]) -> Iterator[Any]:
    """Print the text of a decoding method while it comes."""
    for response in arm(ids):
        print_text(response)
        yield response
    typer.echo()


def _report(rounds: Sequence[tuple[TimedRun, TimedRun]]) -> bool:
    """Print the speeds and whether the texts are equal, and return that."""
    from mlx_redrafter.engine.text_comparison import num_same

    drafted, plain = rounds[-1]
    is_equal = all(one.tokens == plain.tokens for pair in rounds for one in pair)
    texts = f"equal, all {len(plain.tokens)} tokens"
    if not is_equal:
        position = num_same(drafted.tokens, plain.tokens) + 1
        texts = f"DIFFERENT from token {position} on; redrafter-mlx check shows how close they were"
    if not drafted.is_timed or not plain.is_timed:
        typer.echo(f"texts:        {texts}; too short for a speed", err=True)
        return is_equal
    speeds = [(1 / ours.seconds_per_token, 1 / theirs.seconds_per_token) for ours, theirs in rounds]
    speeds.sort(key=lambda pair: pair[0] / pair[1])
    drafting, stock = speeds[(len(speeds) - 1) // 2]  # of one run, so that they divide
    times = "in one run" if len(rounds) == 1 else f"median of {len(rounds)} runs in turns"
    rate = (len(drafted.tokens) - 1) / drafted.steps
    lines = [
        "=" * 10,
        f"mlx-lm:       {stock:.1f} tokens per second",
        f"with drafts:  {drafting:.1f} tokens per second, {rate:.2f} tokens per forward pass",
        f"speed:        {drafting / stock:.2f} times mlx-lm's ({times})",
        f"texts:        {texts}",
    ]
    typer.echo("\n".join(lines), err=True)
    return is_equal

"""``redrafter-mlx try``: one text with drafts and by mlx-lm, with both speeds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.choose_drafter import AUTO
from mlx_redrafter.cli.model_options import CONTEXT, Pair
from mlx_redrafter.cli.run import find_model
from mlx_redrafter.cli.text_options import MaxTokens

if TYPE_CHECKING:
    from mlx_redrafter.engine.engine import Engine

# Prompt of the text if the user gives none.
PROMPT = "Once upon a time"
# Maximum number of rounds: in each, the program generates the text once in both ways.
ROUNDS = 5
# Seconds after which no further round begins.
ENOUGH = 20.0


class _Run(NamedTuple):
    """One generated text: token ids, and tokens per second from the first token to the last."""

    tokens: list[int]
    speed: float
    tokens_per_step: float | None = None


def try_out(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Model: a folder, a repository, or the last part of a repository's name. By "
            "default the bundled demonstration model.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Prompt of the text.")] = PROMPT,
    max_tokens: MaxTokens = 100,
    yes: Annotated[
        bool, typer.Option("--yes", help="Download the model and its drafter without a question.")
    ] = False,
) -> None:
    """Generate a text with drafts and by mlx-lm alone, and compare the texts and the speeds.

    The drafter is the one that --drafter auto would choose. The exit code is 1 if the texts differ.
    """
    check_int("max_tokens", max_tokens, 2)
    pair = Pair() if name is None else Pair(find_model(name, yes), AUTO, yes)
    model, tokenizer, drafter = pair.load(CONTEXT + max_tokens)

    from mlx_redrafter.engine.engine import Engine
    from mlx_redrafter.engine.prompt_encoding import encode_question

    engine = Engine(model, tokenizer, drafter)
    ids = encode_question(tokenizer, prompt)
    end, rounds = time.perf_counter() + ENOUGH, list[tuple[_Run, _Run]]()
    while len(rounds) < ROUNDS and (not rounds or time.perf_counter() < end):
        drafted = _with_drafts(engine, ids, max_tokens, is_shown=not rounds)
        rounds.append((drafted, _by_mlx_lm(engine, ids, max_tokens)))
    if not _report(rounds):
        raise typer.Exit(1)


def _with_drafts(engine: Engine, ids: Sequence[int], max_tokens: int, is_shown: bool) -> _Run:
    tokens, last = [], None
    for last in engine.stream(ids, max_tokens=max_tokens):
        tokens.append(last.token)
        if is_shown:
            sys.stdout.write(last.text)
            sys.stdout.flush()
    if is_shown:
        typer.echo()
    assert last is not None
    return _Run(tokens, last.generation_tps, last.tokens_per_step)


def _by_mlx_lm(engine: Engine, ids: Sequence[int], max_tokens: int) -> _Run:
    from mlx_lm import stream_generate

    responses: Iterable[Any] = stream_generate(
        engine.target.model, engine.tokenizer, list(ids), max_tokens=max_tokens
    )
    tokens, speed = [], 0.0
    for one in responses:
        tokens.append(one.token)
        speed = one.generation_tps
    return _Run(tokens, speed)


def _report(rounds: Sequence[tuple[_Run, _Run]]) -> bool:
    """Print the speeds and whether the texts are equal, and return that."""
    drafted, plain = rounds[-1]
    is_equal = all(one.tokens == plain.tokens for pair in rounds for one in pair)
    ratio = median(ours.speed / stock.speed for ours, stock in rounds)
    times = "in one run" if len(rounds) == 1 else f"median of {len(rounds)} runs in turns"
    rate = f", {drafted.tokens_per_step:.2f} tokens per forward pass"
    lines = [
        "=" * 10,
        f"mlx-lm:       {median(stock.speed for _, stock in rounds):.1f} tokens per second",
        f"with drafts:  {median(ours.speed for ours, _ in rounds):.1f} tokens per second"
        + (rate if drafted.tokens_per_step is not None else ""),
        f"speed:        {ratio:.2f} times mlx-lm's ({times})",
        f"texts:        {_compare(drafted.tokens, plain.tokens, is_equal)}",
    ]
    typer.echo("\n".join(lines), err=True)
    return is_equal


def _compare(drafted: Sequence[int], plain: Sequence[int], is_equal: bool) -> str:
    if is_equal:
        return f"equal, all {len(plain)} tokens"
    position = next(
        (i for i, (ours, theirs) in enumerate(zip(drafted, plain, strict=False)) if ours != theirs),
        min(len(drafted), len(plain)),
    )
    return f"DIFFERENT from token {position + 1} on; redrafter-mlx check shows how close they were"

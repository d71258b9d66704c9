"""``redrafter-mlx chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.cli.model_options import WritingPair
from mlx_redrafter.cli.prompting import ChatTemplateConfig, SystemPrompt, parse_template_options
from mlx_redrafter.cli.result_records import takes_records
from mlx_redrafter.cli.text_options import (
    Debug,
    Drafting,
    MaxTokens,
    TextOptions,
    generation_options,
)
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.engine.conversation import Conversation

COMMANDS = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer"


@dataclass(frozen=True)
class AnswerOptions(TextOptions):
    """Options of answers, which may be long."""

    max_tokens: MaxTokens = 2048


@takes_records
def chat(
    pair: WritingPair,
    *,
    system_prompt: SystemPrompt = None,
    chat_template_config: ChatTemplateConfig = None,
    text: AnswerOptions,
    drafting: Drafting,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print tokens/step and speed after every answer.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk to a model in the terminal; it reads only what is new.

    A line that is /reset begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer.
    """
    options = generation_options(text, drafting)  # checked before anything is loaded
    template_options = parse_template_options(chat_template_config)
    if pair.model is None:
        raise ConfigError("no model given, and the bundled one only continues prose; say --model")
    model, tokenizer, drafter = pair.load()

    from mlx_redrafter.engine.conversation import Conversation
    from mlx_redrafter.engine.engine import Engine

    engine = Engine(model, tokenizer, None if pair.no_draft else drafter)

    def begin() -> Conversation:
        return Conversation(engine, system_prompt, template_options)

    conversation = begin()
    if sys.stdin.isatty():
        with suppress(ImportError):  # edits lines and remembers them, where Python has it
            import readline  # noqa: F401
        typer.echo(COMMANDS, err=True)
    while (message := _read_message()) is not None:
        if message == "/reset":
            conversation = begin()
        elif message == "/exit":
            return
        elif message:
            _answer(conversation, message, vars(options), verbose)


def _read_message() -> str | None:
    """The next line without blanks around it, None at the end."""
    try:
        return input(">> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(
    conversation: Conversation, message: str, options: dict[str, Any], verbose: bool
) -> None:
    """Print the answer to a message as it is made."""
    from mlx_redrafter.cli.progress import prefill_progress

    last = None
    with prefill_progress() as on_progress, suppress(KeyboardInterrupt):
        for last in conversation.ask(message, prompt_progress_callback=on_progress, **options):
            sys.stdout.write(last.text)
            sys.stdout.flush()
    typer.echo()
    if verbose and last is not None:
        rate = "" if last.tokens_per_step is None else f"{last.tokens_per_step:.2f} tokens/step, "
        typer.echo(f"{rate}{last.generation_tps:.1f} tokens/s", err=True)

"""``redrafter-mlx chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.cli.live_text import ShowDrafts, live_text
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import CONTEXT, NamedModel, WritingPair
from mlx_redrafter.cli.prompt_options import (
    ChatTemplateConfig,
    SystemPrompt,
    parse_template_options,
)
from mlx_redrafter.cli.text_options import AnswerOptions, generation_options
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.interrupts import handling

if TYPE_CHECKING:
    from mlx_redrafter.engine.conversation import Conversation

COMMANDS = "/reset starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
# ``mlx.launch`` passes lines on to rank 0 until Ctrl-C, and never the end of the input.
LAUNCHED = "type a message and Enter; /reset starts a new conversation, /exit or Ctrl-C ends it"


@dataclass(frozen=True)
class ChatPair(WritingPair):
    """A pair whose model answers; the bundled one only continues prose."""

    model: NamedModel = None


def chat(
    pair: ChatPair,
    *,
    system_prompt: SystemPrompt = None,
    chat_template_config: ChatTemplateConfig = None,
    text: AnswerOptions,
    show_drafts: ShowDrafts = False,
    verbose: Annotated[bool, "Print tokens/step and speed after every answer."] = False,
) -> None:
    """Talk to a model in the terminal.

    Each line is a message. The model reads only what is new, and keeps the rest in its cache.
    /reset starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.
    """
    options = generation_options(text)  # checked before anything is loaded
    template_options = parse_template_options(chat_template_config)
    if pair.model is None:
        raise ConfigError(
            "chat needs a model that answers, found no --model, and the bundled one only continues "
            "prose; give --model FOLDER or --model ORG/NAME"
        )
    model, tokenizer, drafter = pair.load_writer(
        CONTEXT + max(0, options.max_tokens), options.kv_bits
    )

    from mlx_redrafter.engine.conversation import Conversation
    from mlx_redrafter.engine.engine import Engine

    engine = Engine(model, tokenizer, drafter)

    def begin() -> Conversation:
        return Conversation(engine, system_prompt, template_options)

    conversation = begin()
    if sys.stdin.isatty():
        with suppress(ImportError):  # adds line editing and a history, if Python has it
            import readline  # noqa: F401
        typer.echo(COMMANDS, err=True)
    elif launched_group() is not None:
        typer.echo(LAUNCHED, err=True)
    while (message := _read_message()) is not None:
        if message == "/reset":
            conversation = begin()
        elif message == "/exit":
            return
        elif message:
            _answer(conversation, message, vars(options), show_drafts, verbose)


def _read_message() -> str | None:
    """Read the next line and strip it; return None at the end of the input."""
    try:
        return input(">> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(
    conversation: Conversation,
    message: str,
    options: dict[str, Any],
    shows_drafts: bool,
    verbose: bool,
) -> None:
    """Print the answer to a message token by token."""
    from mlx_redrafter.cli.progress import prefill_progress

    last = None
    with (
        live_text(shows_drafts) as write,
        prefill_progress() as on_progress,
        nullcontext() if launched_group() is not None else _stopping(),
    ):
        for last in conversation.ask(message, prompt_progress_callback=on_progress, **options):
            write(last)
    typer.echo()
    if verbose and last is not None:
        rate = "" if last.tokens_per_step is None else f"{last.tokens_per_step:.2f} tokens/step, "
        typer.echo(f"{rate}{last.generation_tps:.1f} tokens/s", err=True)


@contextmanager
def _stopping() -> Iterator[None]:
    """Let Ctrl-C stop the answer, not the program."""
    with handling(), suppress(KeyboardInterrupt):
        yield

"""``redrafter-mlx chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import typer

from mlx_redrafter.cli.live_text import ShowDrafts
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import CONTEXT, NamedModel, WritingPair
from mlx_redrafter.cli.prompt_options import (
    ChatTemplateConfig,
    SystemPrompt,
    parse_template_options,
)
from mlx_redrafter.cli.text_options import AnswerOptions, generation_options
from mlx_redrafter.errors import ConfigError

COMMANDS = "/help lists the commands, /bye or Ctrl-D ends the chat, Ctrl-C stops an answer"
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

    Each line is a message. The model reads only what is new, and keeps the rest in its cache. Once
    its context is full, it reads the newer messages only. /help lists the commands.
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

    from mlx_redrafter.cli.talk import Talk
    from mlx_redrafter.engine.engine import Engine

    engine = Engine(model, tokenizer, drafter)
    talk = Talk(engine, options, system_prompt, template_options, show_drafts, verbose)
    if sys.stdin.isatty():
        with suppress(ImportError):  # adds line editing and a history, if Python has it
            import readline  # noqa: F401
        typer.echo(COMMANDS, err=True)
    elif launched_group() is not None:
        typer.echo(LAUNCHED, err=True)
    talk.run()

"""``redrafter-mlx chat``: a conversation in the terminal, and commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import mlx_redrafter
from mlx_redrafter.checkpoint_files import expand_home, write_text
from mlx_redrafter.cli.live_text import ShowDrafts, live_text
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import CONTEXT, NamedModel, WritingPair
from mlx_redrafter.cli.progress import prefill_progress
from mlx_redrafter.cli.prompt_options import (
    ChatTemplateConfig,
    SystemPrompt,
    parse_template_options,
)
from mlx_redrafter.cli.text_options import AnswerOptions, generation_options
from mlx_redrafter.destinations import check_destination
from mlx_redrafter.errors import ConfigError, ResourceError, explain
from mlx_redrafter.generation_options import SAMPLING_NAMES, GenerationOptions, SamplingParams
from mlx_redrafter.interrupts import handling

COMMANDS = "/help lists the commands, /bye or Ctrl-D ends the chat, Ctrl-C stops an answer"
# ``mlx.launch`` passes lines on to rank 0 until Ctrl-C, and never the end of the input.
LAUNCHED = "type a message and Enter; /reset starts a new conversation, /exit or Ctrl-C ends it"
# Beginning and end of a message of several lines.
QUOTES = '"""'
# Options that /set changes.
SETTINGS = (*SAMPLING_NAMES, "max_tokens")
# Output of /help.
HELP = f"""\
/set              show the settings; /set temp 0.7 changes one: {", ".join(SETTINGS)}
/set system TEXT  begin a new conversation with this system prompt, or without TEXT with none
/save FILE        write the conversation as a line of JSON, which train --data reads
/reset            begin a new conversation
/bye or /exit     end, as Ctrl-D does; Ctrl-C stops an answer
{QUOTES}               begins and ends a message of several lines"""


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
    length = CONTEXT + max(0, options.max_tokens)
    model, tokenizer, drafter = pair.load_writer(length, options.kv_bits)
    engine = mlx_redrafter.Engine(model, tokenizer, drafter)
    talk = Talk(engine, options, system_prompt, template_options, show_drafts, verbose)
    if sys.stdin.isatty():
        with suppress(ImportError):  # adds line editing and a history, if Python has it
            import readline  # noqa: F401
        typer.echo(COMMANDS, err=True)
    elif launched_group() is not None:
        typer.echo(LAUNCHED, err=True)
    talk.run()


@dataclass
class Talk:
    """A conversation, and the options of its answers; the model has a chat template."""

    engine: mlx_redrafter.Engine
    options: GenerationOptions
    system_prompt: str | None
    template_options: Mapping[str, Any]
    shows_drafts: bool
    verbose: bool

    def __post_init__(self) -> None:
        # Files that /save wrote, which it may replace.
        self._saved: set[Path] = set()
        self._begin()

    def run(self) -> None:
        while (message := _ask()) is not None:
            if message in ("/bye", "/exit"):
                return
            try:
                if message.startswith("/") and "/" not in message.split()[0][1:]:
                    self._command(message)
                elif message:
                    self._answer(message)
            except (ConfigError, ResourceError) as error:  # the conversation is as before
                typer.echo(f"error: {error}", err=True)
            except OSError as error:
                if error.filename is None:  # of stdout, not of a file to save
                    raise
                typer.echo(f"error: {error.filename}: {explain(error)}", err=True)

    def _begin(self) -> None:
        self._conversation = mlx_redrafter.Conversation(
            self.engine, self.system_prompt, self.template_options
        )

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/help", "/?"):
            typer.echo(HELP, err=True)
        elif name == "/reset":
            self._begin()
        elif name == "/save":
            self._save(rest)
        elif name == "/set":
            setting, _, value = rest.partition(" ")
            self._set(setting.replace("-", "_"), value.strip())
        else:
            raise ConfigError(f"unknown command {name}; /help lists them")

    def _set(self, name: str, value: str) -> None:
        if not name:
            shown = {one: getattr(self.options, one) for one in SETTINGS}
            shown["system"] = self.system_prompt
            typer.echo(", ".join(f"{one}={it}" for one, it in shown.items()), err=True)
        elif name == "system":
            self.system_prompt = value or None
            self._begin()
        elif name not in SETTINGS:
            raise ConfigError(f"expected one of {', '.join(SETTINGS)} or system, got {name!r}")
        else:
            kind: Any = type(getattr(SamplingParams, name, 0))
            try:
                number: Any = kind(value)
            except ValueError:
                raise ConfigError(f"{name} must be a number, got {value!r}") from None
            self.options = replace(self.options, **{name: number})
            typer.echo(f"{name}={number}", err=True)

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("expected a file, found none; say /save FILE")
        path, messages = expand_home(name), self._conversation.messages
        if path.exists() and path.resolve() not in self._saved:
            raise ConfigError(f"{path} exists; give /save another file")
        check_destination(path, (), is_own=True, is_folder=False)
        write_text(path, json.dumps({"messages": messages}) + "\n")
        self._saved.add(path.resolve())
        typer.echo(f"saved {len(messages)} messages in {path}", err=True)

    def _answer(self, message: str) -> None:
        conversation, last = self._conversation, None
        num_before = conversation.num_left_out
        with (
            live_text(self.shows_drafts) as write,
            prefill_progress() as on_progress,
            nullcontext() if launched_group() is not None else _stopping(),
        ):
            for last in conversation.ask(
                message, prompt_progress_callback=on_progress, **vars(self.options)
            ):
                write(last)
        typer.echo()
        if conversation.num_left_out > num_before:
            typer.echo(
                f"the model's context of {self.engine.target.context_length:,} tokens is full: it "
                f"no longer reads the oldest {conversation.num_left_out} messages",
                err=True,
            )
        if last is None:
            return
        if last.finish_reason == "length" and last.generation_tokens != self.options.max_tokens:
            typer.echo("the answer ends where the model's context does", err=True)
        if self.verbose:
            rate = last.tokens_per_step
            steps = "" if rate is None else f"{rate:.2f} tokens/step, "
            typer.echo(f"{steps}{last.generation_tps:.1f} tokens/s", err=True)


def _ask() -> str | None:
    """Read the next message; at a terminal, one Ctrl-C in its place does not lose the chat."""
    if sys.stdin.isatty():
        try:
            with handling():
                return _read_message()
        except KeyboardInterrupt:
            typer.echo("\n/bye, Ctrl-D or Ctrl-C once more ends the chat", err=True)
    return _read_message()


def _read_message() -> str | None:
    """Read the next message, one line or more between quotes; None at the end of the input."""
    prompt = ">> " if sys.stdin.isatty() else ""
    try:
        text = input(prompt).strip()
        if not text.startswith(QUOTES):
            return text
        lines = [text.removeprefix(QUOTES)]
        with suppress(EOFError):  # which ends the message as well
            while QUOTES not in lines[-1]:
                lines.append(input("... " if prompt else ""))
        return "\n".join(lines).replace(QUOTES, "", 1).strip()
    except EOFError:
        return None


@contextmanager
def _stopping() -> Iterator[None]:
    """Let Ctrl-C stop the answer, not the program."""
    with handling(), suppress(KeyboardInterrupt):
        yield

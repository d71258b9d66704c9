"""``redrafter-mlx serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.model_options import WritingPair
from mlx_redrafter.cli.text_options import (
    AnswerOptions,
    DraftSizeOptions,
    library_option,
)
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.limits import Limits

SERVER, LIMITS = "Server", "Limits"
# Seconds that running requests have to end after SIGTERM.
GRACE_SECONDS = 30


def _limit_option(name: str) -> Any:
    hint = get_type_hints(Limits, include_extras=True)[name]
    return typer.Option(help=hint.__metadata__[0], rich_help_panel=LIMITS)


@dataclass(frozen=True)
class ServedOptions(AnswerOptions):
    """Options of a text for requests that leave them out, and the chunk size of prompts."""

    prefill_step_size: Annotated[int, library_option("prefill_step_size")] = (
        GenerationOptions.prefill_step_size
    )


@dataclass(frozen=True)
class AddressOptions:
    """Address of the server, and who may use it.

    Attributes:
        allow_origin: Origins of web pages that may use the server.
    """

    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0 picks a free one.", rich_help_panel=SERVER)
    ] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that every request must send. Without a key, anyone who reaches the address "
            "may use the server.",
            envvar="REDRAFTER_API_KEY",
            show_envvar=True,
            show_default=False,
            rich_help_panel=SERVER,
        ),
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in requests. By default the repository, or the folder's name.",
            show_default=False,
            rich_help_panel=SERVER,
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web origin whose pages may use the server, such as http://localhost:3000, or * "
            "for all; may be repeated. By default only the server's own page.",
            show_default=False,
            rich_help_panel=SERVER,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        if self.api_key == "":
            raise ConfigError(
                "api_key must be at least one character long, got ''; leave it out to serve "
                "without a key"
            )


@dataclass(frozen=True)
class LimitOptions:
    """The fields of `Limits` that an operator chooses."""

    max_running: Annotated[int, _limit_option("max_running")] = Limits.max_running
    max_waiting: Annotated[int, _limit_option("max_waiting")] = Limits.max_waiting
    max_context: Annotated[int, _limit_option("max_context")] = Limits.max_context
    prompt_cache_size: Annotated[int, _limit_option("prompt_cache_size")] = Limits.prompt_cache_size
    prompt_cache_bytes: Annotated[int, _limit_option("prompt_cache_bytes")] = (
        Limits.prompt_cache_bytes
    )


def serve(
    pair: WritingPair,
    address: AddressOptions,
    text: ServedOptions,
    drafting: DraftSizeOptions,
    limits: LimitOptions,
) -> None:
    """Serve the model to OpenAI clients, with a chat page for the browser.

    The sampling options and --max-tokens are defaults: a request may set its own.
    """
    defaults = GenerationOptions(**vars(text), **vars(drafting))  # checked before loading
    checked = Limits(**vars(limits))
    if defaults.quantisation is not None:
        # A kept cache may be quantised at a length at which the next text would not quantise yet.
        checked = replace(checked, prompt_cache_size=0)
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"serve needs {name}: pip install 'mlx-redrafter[server]'")
    from mlx_redrafter.server.listening import listen, make_server

    listener = listen(address.host, address.port)
    model, tokenizer, drafter = pair.load_writer()

    from mlx_redrafter.engine.engine import Engine
    from mlx_redrafter.server.worker import Worker

    engine = Engine(model, tokenizer, drafter)
    engine.generate([0], max_tokens=1)  # steps are timed before the first client waits
    name = address.model_name or _name(pair.model)
    server = make_server(
        Worker(engine, checked),
        name,
        defaults,
        checked,
        key=address.api_key,
        origins=address.allow_origin or (),
        grace=GRACE_SECONDS,
    )
    # uvicorn raises the signal again after an orderly end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    host = f"[{address.host}]" if ":" in address.host else address.host
    typer.echo(f"serving {name} at http://{host}:{listener.getsockname()[1]}", err=True)
    server.run([listener])


def _name(model: str | None) -> str:
    """Name a model: the repository as given, or the last part of a folder's path."""
    if model is None:
        return "bundled"
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model

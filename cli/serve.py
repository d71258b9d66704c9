"""``redrafter-mlx serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.chat import AnswerOptions
from mlx_redrafter.cli.model_options import WritingPair
from mlx_redrafter.cli.result_records import takes_records
from mlx_redrafter.cli.text_options import Debug, Drafting, library_option
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.limits import Limits

SERVER, LIMITS = "Server", "Limits"
# Time that texts have to end when the server is told to.
GRACE_SECONDS = 30


def _limit_option(name: str) -> Any:
    hint = get_type_hints(Limits, include_extras=True)[name]
    return typer.Option(help=hint.__metadata__[0], rich_help_panel=LIMITS)


@dataclass(frozen=True)
class ServedOptions(AnswerOptions):
    """Options of texts where a request says nothing, and how their prompts are read."""

    prefill_step_size: Annotated[int, library_option("prefill_step_size")] = (
        GenerationOptions.prefill_step_size
    )


@dataclass(frozen=True)
class Address:
    """Where the server listens, and to whom.

    Attributes:
        allow_origin: Origins of web pages that may use it.
    """

    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.", rich_help_panel=SERVER)] = (
        8080
    )
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that requests must have.",
            envvar="REDRAFTER_API_KEY",
            show_envvar=True,
            rich_help_panel=SERVER,
        ),
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in requests; by default that of --model.",
            rich_help_panel=SERVER,
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may use the server, or * for all; none by default.",
            rich_help_panel=SERVER,
        ),
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    """`Limits` on the command line."""

    max_running: Annotated[int, _limit_option("max_running")] = Limits.max_running
    max_waiting: Annotated[int, _limit_option("max_waiting")] = Limits.max_waiting
    max_context: Annotated[int, _limit_option("max_context")] = Limits.max_context
    max_body_bytes: Annotated[int, _limit_option("max_body_bytes")] = Limits.max_body_bytes
    prompt_cache_size: Annotated[int, _limit_option("prompt_cache_size")] = Limits.prompt_cache_size
    prompt_cache_bytes: Annotated[int, _limit_option("prompt_cache_bytes")] = (
        Limits.prompt_cache_bytes
    )
    patience: Annotated[float, _limit_option("patience")] = Limits.patience


@takes_records
def serve(
    pair: WritingPair,
    address: Address,
    text: ServedOptions,
    drafting: Drafting,
    limits: LimitOptions,
    debug: Debug = False,
) -> None:
    """Serve texts to OpenAI's clients, and a chat in the browser.

    The options of texts are for requests that do not say otherwise.
    """
    defaults = GenerationOptions(**vars(text), **vars(drafting))  # checked before loading
    checked = Limits(**vars(limits))
    if defaults.quantisation is not None:
        # A kept cache may be quantised where the next text of its own would not be yet.
        checked = replace(checked, prompt_cache_size=0)
    check_int("port", address.port, 0, 65535)
    _check_installed()
    from mlx_redrafter.server.listening import listen, make_server

    listener = listen(address.host, address.port)
    model, tokenizer, drafter = pair.load()

    from mlx_redrafter.engine.engine import Engine
    from mlx_redrafter.server.worker import Worker

    engine = Engine(model, tokenizer, None if pair.no_draft else drafter)
    engine.generate([0], max_tokens=1)  # steps are timed before a client waits for it
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
    # uvicorn raises the signal once more when it has ended in good order.
    signal.signal(signal.SIGTERM, lambda *_: None)
    host = f"[{address.host}]" if ":" in address.host else address.host
    typer.echo(f"serving {name} at http://{host}:{listener.getsockname()[1]}", err=True)
    server.run([listener])


def _name(model: str | None) -> str:
    """The name of a repository as it is, of a folder its last part."""
    if model is None:
        return "bundled"
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model


def _check_installed() -> None:
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"serve needs {name}: pip install 'mlx-redrafter[server]'")

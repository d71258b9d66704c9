"""``redrafter-mlx serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

import mlx_redrafter
from mlx_redrafter.checkpoint_files import CONFIG_FILE, expand_home
from mlx_redrafter.checkpoints.bundled import checkpoint_name, local_folder
from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import AdapterPath, TrustRemoteCode, WritingPair, Yes
from mlx_redrafter.cli.text_options import (
    MODEL,
    DraftSizeOptions,
    MaxTokens,
    TextOptions,
    with_library_options,
)
from mlx_redrafter.errors import ConfigError, how_to_install
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.interrupts import handling
from mlx_redrafter.server.limits import Limits

if TYPE_CHECKING:
    from mlx_redrafter.server.models import Model

KEY_VARIABLE = "REDRAFTER_API_KEY"


@dataclass(frozen=True)
class ServedModels:
    panel: ClassVar = MODEL
    model: Annotated[
        list[str] | None,
        "Model to serve: a folder, a hub repository, the last part of the name of one on this "
        "machine, or a folder of models; may be repeated. A single model is loaded at the start, "
        "several ones at their first requests. By default the bundled demonstration model.",
    ] = None
    drafter: Annotated[
        list[str] | None,
        "Drafter of the model, as for generate; one for all models, or repeated in the "
        "order of the models.",
        "--drafter",
        "--draft-model",
    ] = None
    yes: Yes = False
    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False

    def pairs(self) -> list[WritingPair]:
        """Return every model with its drafter; there must be one drafter, or one per model."""
        found = [one for given in self.model or () for one in _models_in(given)]
        models: list[str | None] = [*found] or [None]
        drafters: list[str | None] = [*self.drafter] if self.drafter else [None]
        if len(drafters) == 1:
            drafters *= len(models)
        if len(drafters) != len(models):
            raise ConfigError(
                f"drafter must be given once, or once for each of the {len(models)} models, got "
                f"{len(drafters)}"
            )
        if self.adapter_path is not None and len(models) > 1:
            raise ConfigError("adapter_path is for a single model; serve one, or leave it out")
        return [
            WritingPair(model, drafter, self.yes, self.adapter_path, self.trust_remote_code)
            for model, drafter in zip(models, drafters, strict=True)
        ]


@dataclass(frozen=True)
@with_library_options("prefill_step_size")
class ServedOptions(TextOptions):
    """Options of a text for requests that leave them out, and the chunk size of prompts."""

    # Many agents send no limit, and a call that is cut is none.
    max_tokens: MaxTokens = -1


@dataclass(frozen=True)
class AddressOptions:
    panel: ClassVar = "Server"
    host: Annotated[str, "Address to listen at."] = "127.0.0.1"
    port: Annotated[int, "Port to listen at; 0 picks a free one."] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that every request must send. Without a key, anyone who reaches the address "
            "may use the server.",
            envvar=KEY_VARIABLE,
            rich_help_panel="Server",
        ),
    ] = None
    model_name: Annotated[
        str | None,
        "Name of the model in requests. By default the repository, or the folder's name.",
    ] = None
    strict_names: Annotated[
        bool, "Refuse requests that name another model; without it, the first model answers."
    ] = False
    allow_host: Annotated[
        list[str] | None,
        "Name under which clients reach the server, besides its address and localhost; "
        "may be repeated.",
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        "Web origin whose pages may use the server, such as http://localhost:3000, or * "
        "for all; may be repeated. By default only the server's own page.",
    ] = None

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        # Typer takes an empty variable for none at all, which would open the server.
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise ConfigError(
                f"api_key must be at least one character long, got {key!r}; leave it out and unset "
                f"{KEY_VARIABLE} to serve without a key"
            )


def serve(
    models: ServedModels,
    address: AddressOptions,
    text: ServedOptions,
    drafting: DraftSizeOptions,
    limits: Limits,
    verbose: Annotated[bool, "Also log what drafting has found for every text."] = False,
) -> None:
    """Serve models to clients of OpenAI, Anthropic and Ollama, with a chat page for the browser.

    The sampling options and --max-tokens are defaults: a request may set its own.
    """
    logger = logging.getLogger("mlx_redrafter")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    defaults = GenerationOptions(**vars(text), **vars(drafting))  # checked before loading
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"serve needs {name}: {how_to_install('server')}")
    from mlx_redrafter.server.listening import listen

    with listen(address.host, address.port) as listener:
        _run(listener, models, address, defaults, limits)


def _run(
    listener: socket.socket,
    models: ServedModels,
    address: AddressOptions,
    defaults: GenerationOptions,
    limits: Limits,
) -> None:
    """Load the models and answer requests until the process gets a signal."""
    # While models are loaded, and again after an orderly end, when uvicorn raises the signal again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    pairs = models.pairs()
    for pair in pairs:
        _ = pair.place, pair.given_drafter  # asks before a download
    served = _name_models(pairs, address.model_name)
    is_split = launched_group() is not None
    if is_split:
        limits = _for_machines(served, limits)

    from mlx_redrafter.measured import cache_folder
    from mlx_redrafter.server.application import make_application
    from mlx_redrafter.server.callers import LOCAL_HOSTS, Callers
    from mlx_redrafter.server.listening import Server
    from mlx_redrafter.server.models import Models
    from mlx_redrafter.server.protocols.service import Service
    from mlx_redrafter.server.worker import Worker

    hosts, origins = address.allow_host or (), address.allow_origin or ()
    callers = Callers(address.host, hosts, origins, address.api_key)
    worker = Worker(limits)
    if is_split:
        from mlx_redrafter.machines.line import before_end

        before_end.append(worker.abandon)
    folder = cache_folder()
    prompts = folder and folder / "prompts"
    known = Models(served, defaults, limits, worker.is_busy, address.strict_names, prompts)
    if len(served) == 1:
        known.load(served[0])
    application = make_application(Service(known, worker, callers))
    # Other machines end with this process, in order.
    server = Server(
        application, limits.client_timeout, grace=30, worker=worker, ends_process=not is_split
    )
    if address.api_key is None and address.host not in LOCAL_HOSTS:
        typer.echo(
            f"anyone who reaches {address.host} may use this server; give it a key with --api-key",
            err=True,
        )
    host = f"[{address.host}]" if ":" in address.host else address.host
    names = ", ".join(model.name for model in served)
    typer.echo(f"serving {names} at http://{host}:{listener.getsockname()[1]}", err=True)
    with handling(2):  # the server answers its clients first
        server.run([listener])


def _for_machines(served: list[Model], limits: Limits) -> Limits:
    """Keep the one model for good, and prompts in memory: each rank has its part of both."""
    if len(served) > 1:
        raise ConfigError(f"expected one model on several machines, found {len(served)}; serve one")
    served[0].load = cache(served[0].load)
    typer.echo("prompts are kept in memory only on several machines, not on the disk", err=True)
    return replace(limits, prompt_disk_bytes=0)


def _models_in(name: str) -> list[str]:
    """Return a model's name, or those of the models in a folder that is no model itself."""
    folder = expand_home(name)
    if not folder.is_dir() or (folder / CONFIG_FILE).exists():
        return [name]
    found = sorted(str(one.parent) for one in folder.glob(f"*/{CONFIG_FILE}"))
    if not found:
        raise ConfigError(f"model must be a model or a folder of models, found none in {name}")
    return found


def _name_models(pairs: list[WritingPair], given: str | None) -> list[Model]:
    """Make the models of pairs, each with a name of its own."""
    from mlx_redrafter.server.models import Model

    if given is not None and len(pairs) > 1:
        raise ConfigError("model_name is for a single model; serve one, or leave it out")
    found: dict[str, Model] = {}
    for pair in pairs:
        name = given or checkpoint_name(pair.model)
        if name in found:
            raise ConfigError(f"model must have names of their own, got {name} twice")
        folder = local_folder(pair.model)
        found[name] = Model(name, partial(_load, pair), folder, partial(_name_drafter, pair))
    return list(found.values())


def _name_drafter(pair: WritingPair) -> str:
    return pair.drafter_name or "bundled"


def _load(pair: WritingPair) -> mlx_redrafter.Engine:
    engine = mlx_redrafter.Engine(*pair.load_writer())
    engine.generate([0], max_tokens=2)  # steps are timed before the first client waits
    return engine

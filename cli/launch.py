"""``redrafter-mlx launch``: a coding agent that uses a model of this machine."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated, Any

import typer

from mlx_redrafter.checkpoints.bundled import checkpoint_name, local_folder
from mlx_redrafter.checks import check_choice, check_int
from mlx_redrafter.cli.model_options import Yes
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.interrupts import handling
from mlx_redrafter.server.limits import Limits

# Address of the server, which only this machine reaches.
HOST = "127.0.0.1"
# Key that agents send to a server without one, since some do not start without a key.
NO_KEY = "none"
# Milliseconds that an agent waits for the next token: a prompt of 60,000 tokens takes minutes.
PATIENCE = 15 * 60 * 1000


@dataclass(frozen=True)
class ServerOptions:
    model: Annotated[
        str | None, "Model, as for serve. By default that of the server that runs already."
    ] = None
    drafter: Annotated[str | None, "Drafter of a server to start."] = None
    yes: Yes = False
    port: Annotated[int, "Port of the server."] = 8080
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="REDRAFTER_API_KEY")
    ] = None

    def __post_init__(self) -> None:
        check_int("port", self.port, 1, 65535)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """Settings of one process: environment variables, and arguments before those of the user."""

    variables: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agent:
    """A coding agent: its package at npm, and the function that makes its settings.

    The function gets the server, the name of its model, and the maximum number of tokens of a
    prompt and its answer.
    """

    package: str
    configure: Callable[[ServerOptions, str, int], Settings]


def _claude(server: ServerOptions, model: str, context: int) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key or NO_KEY,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        # A line about billing at the head of each prompt differs from session to session.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "API_TIMEOUT_MS": str(PATIENCE),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE),
        "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE),
    }
    return Settings(variables)


def _codex(server: ServerOptions, model: str, context: int) -> Settings:
    provider: dict[str, str | int] = {
        "name": "redrafter-mlx",
        "base_url": f"{server.url}/v1",
        "stream_idle_timeout_ms": PATIENCE,
    }
    variables = {}
    if server.api_key is not None:
        provider["env_key"] = "REDRAFTER_API_KEY"
        variables["REDRAFTER_API_KEY"] = server.api_key
    values: dict[str, str | int] = {"model": model, "model_provider": "redrafter"}
    values |= {f"model_providers.redrafter.{name}": value for name, value in provider.items()}
    values |= {"model_context_window": context}
    # JSON spells texts and numbers as TOML does.
    pairs = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return Settings(variables, [word for pair in pairs for word in ("-c", pair)])


def _opencode(server: ServerOptions, model: str, context: int) -> Settings:
    # Within the context, opencode leaves room for an answer of so many tokens.
    limit = {"context": context, "output": min(8192, context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key or NO_KEY},
        "models": {model: {"limit": limit}},
    }
    content = {"provider": {"redrafter": provider}, "model": f"redrafter/{model}"}
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def _qwen(server: ServerOptions, model: str, context: int) -> Settings:
    key = {"OPENAI_API_KEY": server.api_key or NO_KEY, "OPENAI_MODEL": model}
    return Settings({"OPENAI_BASE_URL": f"{server.url}/v1", **key})


AGENTS = {
    "claude": Agent("@anthropic-ai/claude-code", _claude),
    "codex": Agent("@openai/codex", _codex),
    "opencode": Agent("opencode-ai", _opencode),
    "qwen": Agent("@qwen-code/qwen-code", _qwen),
}


def launch(
    agent: Annotated[
        str,
        typer.Argument(
            help=f"Agent to start: {', '.join(AGENTS)}.",
            autocompletion=lambda incomplete: [one for one in AGENTS if one.startswith(incomplete)],
        ),
    ],
    server: ServerOptions,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the agent, after two dashes.")
    ] = None,
    only_print: Annotated[
        bool, "Print the settings and the command; start nothing.", "--print"
    ] = False,
) -> None:
    """Start an installed coding agent with a model of this machine.

    Uses the server at --port if one runs there, or starts one for as long as the agent runs. The
    settings hold for this process only: the agent's own configuration stays as it is.
    """
    check_choice("agent", agent, AGENTS)
    if only_print:
        model = _find(server) or _describe_stored(server)
        settings = _configure(agent, server, model)
        typer.echo(_as_command(agent, settings, arguments or []))
        return
    program = shutil.which(agent)
    if program is None:
        raise ConfigError(
            f"{agent} is not installed; install it with: npm install -g {AGENTS[agent].package}"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):  # end in order, so that the server ends, too
        signal.signal(number, lambda one, _: sys.exit(128 + one))
    with _running(server) as model:
        settings = _configure(agent, server, model)
        typer.echo(f"{agent} uses the model {model['id']} at {server.url}:", err=True)
        shown = _as_command(agent, settings, arguments or [])
        key = server.api_key
        typer.echo(f"  {shown.replace(key, '***') if key else shown}", err=True)
        command = [program, *settings.arguments, *(arguments or [])]
        variables = {**os.environ, **settings.variables}
        ours = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the agent
        with handling(sys.maxsize), subprocess.Popen(command, env=variables) as process:
            try:
                code = process.wait()
            except SystemExit:  # the agent, too, ends in order
                process.terminate()
                raise
        signal.signal(signal.SIGINT, ours)
    raise typer.Exit(code if code >= 0 else 128 - code)  # as a shell says that a signal did it


@contextmanager
def _running(server: ServerOptions) -> Iterator[dict[str, Any]]:
    """Find the server, or start one and end it; give its model."""
    if (found := _find(server)) is not None:
        yield found
        return
    with tempfile.NamedTemporaryFile("w", prefix="redrafter-mlx-", suffix=".log") as log:
        typer.echo(f"starting a server at {server.url}; its log is {log.name}", err=True)
        key = {} if server.api_key is None else {"REDRAFTER_API_KEY": server.api_key}
        with subprocess.Popen(
            _serve_command(server),
            stdout=log,
            stderr=log,
            env={**os.environ, **key},
            start_new_session=True,  # Ctrl-C is for the agent
        ) as process:
            try:
                yield _wait(server, process, log.name)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(40)  # its texts have 30 s to end
                process.kill()


def _serve_command(server: ServerOptions) -> list[str]:
    address = ["--port", str(server.port), "--host", HOST]
    command = [sys.executable, "-m", "mlx_redrafter", "serve", *address]
    for name, value in (("model", server.model), ("drafter", server.drafter)):
        command += [] if value is None else [f"--{name}", value]
    return [*command, "--yes"] if server.yes else command


def _wait(server: ServerOptions, process: subprocess.Popen[bytes], log: str) -> dict[str, Any]:
    while (found := _find(server)) is None:
        if process.poll() is not None:
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = file.read().strip().splitlines()
            raise ConfigError(f"the server ended: {lines[-1] if lines else 'without a message'}")
        time.sleep(0.2)
    return found


def _find(server: ServerOptions) -> dict[str, Any] | None:
    """Return the model of the server that runs; None if none does."""
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    request = urllib.request.Request(f"{server.url}/v1/models", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=2) as response:
            models = json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise ConfigError(
            f"the server at {server.url} answers with status {error.code}; give its --api-key, or "
            "another --port"
        ) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    except HTTPException:  # it does not speak HTTP
        models = []
    if not models or any(one.get("owned_by") != "mlx_redrafter" for one in models):
        raise ConfigError(f"another program's server runs at {server.url}; give another --port")
    return _choose(models, server)


def _describe_stored(server: ServerOptions) -> dict[str, Any]:
    """Describe the model of a server that does not run, and say how to start it."""
    from mlx_redrafter.checkpoints.memory_check import read_context_length

    command = shlex.join(["redrafter-mlx", *_serve_command(server)[3:]])
    if server.api_key is not None:
        command = f"REDRAFTER_API_KEY={shlex.quote(server.api_key)} {command}"
    typer.echo(f"no server runs at {server.url}; start it first: {command}", err=True)
    folder = local_folder(server.model)
    context = None if folder is None else read_context_length(folder)
    return {"id": checkpoint_name(server.model), "context_length": context}


def _choose(models: list[dict[str, Any]], server: ServerOptions) -> dict[str, Any]:
    names = [one["id"] for one in models]
    wanted = names[0] if server.model is None else checkpoint_name(server.model)
    if wanted not in names:
        raise ConfigError(
            f"the server at {server.url} serves {', '.join(names)}; leave --model out, or give "
            "another --port"
        )
    found = models[names.index(wanted)]
    if found.get("has_chat") is False:
        raise ConfigError(f"{wanted} has no chat template, which agents need; give another --model")
    if found.get("has_tools") is False:
        typer.echo(
            f"{wanted} takes no tools: its chat template has none, and requests with tools fail; "
            "give another --model",
            err=True,
        )
    return found


def _configure(agent: str, server: ServerOptions, model: dict[str, Any]) -> Settings:
    context = min(model.get("context_length") or Limits.max_context, Limits.max_context)
    return AGENTS[agent].configure(server, model["id"], context)


def _as_command(agent: str, settings: Settings, arguments: list[str]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.variables.items()]
    return " ".join([*variables, agent, *map(shlex.quote, [*settings.arguments, *arguments])])

"""Coding agents that `launch` starts, and the smallest settings with which each uses a server.

The settings are environment variables and arguments of one process. No file is written.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

# Key that agents send to a server without one, since some do not start without a key.
NO_KEY = "none"
# Milliseconds that an agent waits for the next token: a prompt of 60,000 tokens takes minutes.
PATIENCE = 15 * 60 * 1000
# Tokens of an answer that opencode leaves room for within the context.
OPENCODE_ANSWER = 8192


@dataclass(frozen=True)
class Address:
    """A server and its model.

    Attributes:
        url: Address of the server, without ``/v1``.
        key: Key of the server; None if it needs none.
        context: Maximum number of tokens of a prompt and its answer.
    """

    url: str
    model: str
    key: str | None
    context: int


@dataclass(frozen=True)
class Settings:
    """Settings of one process: environment variables, and arguments before those of the user."""

    variables: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agent:
    """A coding agent: its package at npm, and the function that makes its settings."""

    package: str
    configure: Callable[[Address], Settings]


def _claude(address: Address) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": address.url,
        "ANTHROPIC_AUTH_TOKEN": address.key or NO_KEY,
        "ANTHROPIC_MODEL": address.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": address.model,
        # A line about billing at the head of each prompt differs from session to session.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "API_TIMEOUT_MS": str(PATIENCE),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE),
        "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE),
    }
    return Settings(variables)


def _codex(address: Address) -> Settings:
    provider: dict[str, str | int] = {
        "name": "redrafter-mlx",
        "base_url": f"{address.url}/v1",
        "stream_idle_timeout_ms": PATIENCE,
    }
    variables = {}
    if address.key is not None:
        provider["env_key"] = "REDRAFTER_API_KEY"
        variables["REDRAFTER_API_KEY"] = address.key
    values: dict[str, str | int] = {"model": address.model, "model_provider": "redrafter"}
    values |= {f"model_providers.redrafter.{name}": value for name, value in provider.items()}
    values |= {"model_context_window": address.context}
    # JSON spells texts and numbers as TOML does.
    pairs = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return Settings(variables, [word for pair in pairs for word in ("-c", pair)])


def _opencode(address: Address) -> Settings:
    answer = min(OPENCODE_ANSWER, address.context // 2)
    model = {"limit": {"context": address.context, "output": answer}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{address.url}/v1", "apiKey": address.key or NO_KEY},
        "models": {address.model: model},
    }
    content = {"provider": {"redrafter": provider}, "model": f"redrafter/{address.model}"}
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def _qwen(address: Address) -> Settings:
    key = {"OPENAI_API_KEY": address.key or NO_KEY, "OPENAI_MODEL": address.model}
    return Settings({"OPENAI_BASE_URL": f"{address.url}/v1", **key})


# Agents by the name of their program.
AGENTS = {
    "claude": Agent("@anthropic-ai/claude-code", _claude),
    "codex": Agent("@openai/codex", _codex),
    "opencode": Agent("opencode-ai", _opencode),
    "qwen": Agent("@qwen-code/qwen-code", _qwen),
}

"""Requests of the soak test: one chat in every protocol, whole and streamed, and bad ones."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

# Beginnings that share a prefix, or are the beginning of another.
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a king",
    "The old man opened the door and",
    "It was a dark night. " * 60,
    "It was a dark night. " * 60 + "She said nothing",
)
# Seconds until a client gives up.
PATIENCE = 300.0


@dataclass(frozen=True)
class Protocol:
    """A protocol, as its clients see it.

    Attributes:
        path: Path of its requests.
        make_body: Function of the chat's prompt, number of tokens, temperature and seed.
        read_whole: Function that returns the texts of a whole answer.
        read_event: Function that returns the index of a text and what an event adds to it.
        may_branch: Whether a request may ask for several texts.
    """

    path: str
    make_body: Callable[[str, int, float, int], dict[str, Any]]
    read_whole: Callable[[Any], list[str]]
    read_event: Callable[[Any], tuple[int, str]]
    may_branch: bool = False


def _chat_body(prompt: str, most: int, temp: float, seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": most, "temperature": temp, "seed": seed}


def _read_chat_event(event: Any) -> tuple[int, str]:
    choice = event["choices"][0]
    return choice["index"], choice["delta"].get("content") or ""


def _completion_body(prompt: str, most: int, temp: float, seed: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": most, "temperature": temp, "seed": seed}


def _anthropic_body(prompt: str, most: int, temp: float, seed: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": most, "temperature": 0}


def _responses_body(prompt: str, most: int, temp: float, seed: int) -> dict[str, Any]:
    return {"input": prompt, "max_output_tokens": most, "temperature": 0, "store": False}


def _ollama_body(prompt: str, most: int, temp: float, seed: int) -> dict[str, Any]:
    options = {"num_predict": most, "temperature": temp, "seed": seed}
    return {"messages": [{"role": "user", "content": prompt}], "options": options}


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        _chat_body,
        lambda answer: [one["message"]["content"] for one in answer["choices"]],
        _read_chat_event,
        may_branch=True,
    ),
    "completions": Protocol(
        "/v1/completions",
        _completion_body,
        lambda answer: [one["text"] for one in answer["choices"]],
        lambda event: (event["choices"][0]["index"], event["choices"][0]["text"]),
        may_branch=True,
    ),
    "messages": Protocol(
        "/v1/messages",
        _anthropic_body,
        lambda answer: ["".join(one.get("text", "") for one in answer["content"])],
        lambda event: (0, event.get("delta", {}).get("text", "")),
    ),
    "responses": Protocol(
        "/v1/responses",
        _responses_body,
        lambda answer: [
            "".join(part["text"] for one in answer["output"] for part in one.get("content", ()))
        ],
        lambda event: (0, event["delta"] if event["type"].endswith("text.delta") else ""),
    ),
    "ollama": Protocol(
        "/api/chat",
        _ollama_body,
        lambda answer: [answer["message"]["content"]],
        lambda event: (0, event["message"]["content"]),
    ),
}


@dataclass(frozen=True)
class Case:
    """A request with a known answer.

    Attributes:
        protocol: Name of its protocol.
        body: Body of the request, which does not say whether it is streamed.
    """

    protocol: str
    body: dict[str, Any]


def make_cases(models: list[str], max_tokens: int) -> list[Case]:
    """Make requests for every protocol, most of them for the first model."""
    cases = []
    for name, protocol in PROTOCOLS.items():
        for seed, prompt in enumerate(PROMPTS):
            for temp in (0.0, 1.0):
                body = protocol.make_body(prompt, max_tokens, temp, seed)
                model = models[-1] if temp and seed == 0 else models[0]
                cases.append(Case(name, {**body, "model": model}))
                if protocol.may_branch and temp:
                    cases.append(Case(name, {**body, "model": models[0], "n": 3}))
    return cases


# Requests that must fail, and the statuses that they may get.
BAD: tuple[tuple[str, bytes, set[int]], ...] = (
    ("/v1/chat/completions", b"{", {400}),
    ("/v1/chat/completions", b'{"messages": []}', {400}),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": "A"}]}', {400}),
    ("/v1/responses", b'{"input": "A", "previous_response_id": "resp_none"}', {400, 404}),
    ("/v1/completions", b'{"prompt": "%s"}' % (b"word " * 200_000), {400}),
    ("/v1/completions", b'{"prompt": "A", "colour": "red"}', {400}),
    ("/v1/nothing", b"{}", {404}),
)


class Failed(Exception):
    """A request that was answered with an error."""


def ask(port: int, case: Case, streams: bool, draw: random.Random | None = None) -> list[str]:
    """Return the texts of a request.

    Args:
        port: Port of the server on this machine.
        case: The request.
        streams: Whether to stream the answer.
        draw: Random numbers of a client that goes away; None to wait for the answer.

    Raises:
        Failed: It was answered with an error.
        OSError: The connection broke.
        http.client.HTTPException: The connection broke.
    """
    protocol = PROTOCOLS[case.protocol]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        content = json.dumps({**case.body, "stream": streams})
        connection.request("POST", protocol.path, content, {"Content-Type": "application/json"})
        if draw is not None and draw.random() < 0.5:
            return []
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"{response.status}: {response.read().decode()[:300]}")
        if not streams:
            return protocol.read_whole(json.loads(response.read()))
        texts: dict[int, str] = {}
        for event in _events(response):
            if event.get("error") or event.get("type") == "error":
                raise Failed(json.dumps(event)[:300])
            if draw is not None and draw.random() < 0.2:
                return []
            index, added = protocol.read_event(event)
            texts[index] = texts.get(index, "") + added
    return [texts[index] for index in sorted(texts)]


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the events of a stream: server-sent ones, or lines of JSON."""
    for raw in response:
        line = raw.decode().strip().removeprefix("data: ")
        if line.startswith("{"):
            yield json.loads(line)


def ask_badly(port: int, draw: random.Random) -> None:
    """Send a request that must fail.

    Raises:
        Failed: It was answered otherwise.
    """
    path, body, statuses = draw.choice(BAD)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status not in statuses or b"error" not in response.read():
            raise Failed(f"{path}: expected {statuses}, found {response.status}")

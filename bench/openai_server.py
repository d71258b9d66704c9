"""An OpenAI server as a decoding method: texts streamed from a URL, and their times."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urldefrag, urlsplit

from mlx_redrafter.checks import as_mapping
from mlx_redrafter.errors import DataError, RedrafterError, ResourceError

# Seconds that a server may be silent, such as while it processes a long prompt.
SILENCE = 600.0
# Maximum length of a line of a stream, in bytes; an event carries a few tokens.
MAX_LINE = 1 << 20


@dataclass(frozen=True)
class ServedText:
    """A text of a server, with the seconds from the request to its first and its last piece.

    ``steps`` counts the forward passes of the target after the first token, if the server does.
    """

    text: str
    first: float
    last: float
    steps: int | None


@dataclass(frozen=True)
class OpenAiServer:
    """A server with OpenAI's chats or completions.

    ``url`` is that of the API, such as http://127.0.0.1:8080/v1. ``counts_steps`` is whether the
    server is this project's, which reports steps on request.
    """

    name: str
    url: str
    model: str
    counts_steps: bool = False
    key: str | None = field(default=None, repr=False)

    def write(
        self, texts: Sequence[str], is_chat: bool, max_tokens: int, temp: float, seed: int
    ) -> list[ServedText]:
        """Ask for the answers to several messages, or the ends of prompts, at the same time."""
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temp,
            "seed": seed,
            "stream": True,
        }
        if self.counts_steps:
            options["stream_options"] = {"include_drafts": True}

        def ask(text: str) -> ServedText:
            if is_chat:
                messages = [{"role": "user", "content": text}]
                return self._stream("chat/completions", {**options, "messages": messages})
            return self._stream("completions", {**options, "prompt": text})

        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(ask, texts))

    def _stream(self, path: str, request: Mapping[str, Any]) -> ServedText:
        text, first, last, steps = "", 0.0, 0.0, None
        start = time.perf_counter()
        for event in self._events(path, request):
            piece = _text_of(event)
            if piece:
                last = time.perf_counter() - start
                first = first or last
                text += piece
            steps = _steps_of(event) or steps
        return ServedText(text, first, last, steps)

    def _events(self, path: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for line in _open(f"{self.url}/{path}", self.key, request):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = _parse(data, self.url)
            if event.get("error"):
                raise DataError(f"{self.url} stopped a text: {_message(data)}")
            yield event
        raise ResourceError(f"{self.url} ended a stream without [DONE]; see the server's log")


def find_server(address: str, key: str | None = None) -> OpenAiServer:
    """Find a server and its model.

    ``address`` is NAME=URL, such as mlx-lm=http://127.0.0.1:8080/v1; #MODEL at the end chooses one
    of several models. ``key`` is for a server that needs one.
    """
    name, _, rest = address.partition("=")
    url, model = urldefrag(rest)
    url = url.rstrip("/")
    if not name or urlsplit(url).scheme not in ("http", "https"):
        raise DataError(
            f"expected a server such as mlx-lm=http://127.0.0.1:8080/v1, got {address!r}"
        )
    try:
        found = _models(url, key)
    except RedrafterError:
        if not model:  # mlx-lm's server cannot list its models without a Hugging Face cache
            raise
        found = []
    names = [str(one.get("id")) for one in found]
    if not model and len(names) != 1:
        raise DataError(f"{url} has {len(names)} models ({', '.join(names[:8])}); add #MODEL")
    is_ours = any(one.get("owned_by") == "mlx_redrafter" for one in found)
    return OpenAiServer(name, url, model or names[0], is_ours, key)


def _models(url: str, key: str | None) -> list[dict[str, Any]]:
    found = _parse(b"".join(_open(f"{url}/models", key)), url).get("data")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{url}/models: expected a list of models; is this the address of the API?")
    return found


def _open(url: str, key: str | None, request: Mapping[str, Any] | None = None) -> Iterator[bytes]:
    body = None if request is None else json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    asked = urllib.request.Request(url, body, headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(asked, timeout=SILENCE) as response:
            while line := response.readline(MAX_LINE):
                yield line
    except urllib.error.HTTPError as error:
        raise DataError(
            f"{url} answers with status {error.code}: {_message(error.read(MAX_LINE))}"
        ) from error
    except (OSError, ValueError) as error:
        raise ResourceError(f"cannot reach {url}: {error}; is the server running?") from error


def _parse(data: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url}: expected JSON, got {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise DataError(f"{url}: expected an object, got {data[:80]!r}")
    return value


def _message(reply: bytes) -> str:
    """Return the message of an error in the form of OpenAI, or the first characters of another."""
    try:
        values = json.loads(reply)
    except (ValueError, RecursionError):
        return reply[:200].decode(errors="replace")
    error = values.get("error") if isinstance(values, dict) else values
    found = error.get("message") if isinstance(error, dict) else error
    return str(found or values)[:200]


def _choice(event: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = event.get("choices")
    return as_mapping(choices[0] if isinstance(choices, list) and choices else None)


def _text_of(event: Mapping[str, Any]) -> str:
    choice = _choice(event)
    delta = as_mapping(choice.get("delta", choice))
    names = ("reasoning", "reasoning_content", "content", "text")
    pieces = dict.fromkeys(delta.get(name) for name in names)  # some servers send reasoning twice
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _steps_of(event: Mapping[str, Any]) -> int | None:
    """Return the number of forward passes as this project, mlx-dspark or llama.cpp reports it.

    The latter two count the first token's pass, too.
    """
    timings = as_mapping(event.get("timings"))
    predicted, accepted = timings.get("predicted_n"), timings.get("draft_n_accepted", 0)
    forwards = as_mapping(event.get("x_mlx_dspark")).get("target_forwards")
    if isinstance(predicted, int):
        return predicted - 1 - accepted if isinstance(accepted, int) else None
    if isinstance(forwards, int):
        return forwards - 1
    steps = _choice(event).get("steps")
    return steps if isinstance(steps, int) else None

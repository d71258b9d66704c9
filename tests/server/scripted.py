"""A server with the chat page whose answers are written beforehand."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mlx_redrafter.server.application import FILES, send_file
from tests.server.serving import running

MODEL = {
    "id": "org/scripted", "state": "loaded", "has_chat": True, "context_length": 8192,
    "drafter": "org/drafter", "defaults": {"temperature": 0.5, "max_tokens": 256},
}  # fmt: skip


@dataclass
class Scripted:
    """A server without a model.

    Attributes:
        pieces: Tokens of the next answers; every second one is a draft.
        pause: Seconds between two tokens.
        held: Number of tokens after which answers wait for `go`; None for none.
        thought: Number of tokens of thinking before each answer.
        end: How answers end: a finish reason, "broken" after `go`, or an error object.
        refusals: Responses for the next requests, before they are answered.
        asked: Bodies of the requests for answers, with their paths.
    """

    port: int = 0
    models: list[dict[str, Any]] = field(default_factory=lambda: [dict(MODEL)])
    pieces: list[str] = field(default_factory=list)
    pause: float = 0.0
    held: int | None = None
    thought: int = 0
    end: Any = "stop"
    refusals: list[Response] = field(default_factory=list)
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def say(self, text: str, **changes: Any) -> None:
        """Choose the next answers by words, and how they are sent."""
        self.pieces = [f"{word} " for word in text.split(" ")]
        self.pieces[-1] = self.pieces[-1][:-1]
        self.pause, self.held, self.thought, self.end = 0.0, None, 0, "stop"
        self.go.clear()
        for name, value in changes.items():
            setattr(self, name, value)

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Refuse one more request."""
        error = {"error": {"message": message, "code": code}}
        self.refusals.append(JSONResponse(error, status))

    async def list_models(self, request: Request) -> Response:
        """Answer ``/v1/models``."""
        return self._check_key(request) or JSONResponse({"data": self.models})

    async def answer(self, request: Request) -> Response:
        self.asked.append({**await request.json(), "path": request.url.path})
        if refusal := self._check_key(request):
            return refusal
        if self.refusals:
            return self.refusals.pop(0)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    def _check_key(self, request: Request) -> Response | None:
        is_right = request.headers.get("authorization", "") == f"Bearer {self.key}"
        return None if is_right or not self.key else JSONResponse({"error": {}}, 401)

    async def _stream(self) -> AsyncIterator[str]:
        steps = 0
        for i, piece in enumerate(self.pieces):
            if i == self.held:
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(self.pause)
            is_draft = i % 2 == 1
            steps += not is_draft
            choice = {"delta": {"content": piece}, "text": piece, "is_draft": is_draft}
            yield _event({"choices": [choice | {"tokens": i + 1, "steps": steps}]})
        if self.end == "broken":
            while not self.go.is_set():  # browsers drop what comes together with the error
                await asyncio.sleep(0.01)
            raise ConnectionResetError
        if isinstance(self.end, dict):
            yield _event(self.end)
            return
        number = len(self.pieces)
        last = {"delta": {}, "finish_reason": self.end, "tokens": number, "steps": steps}
        yield _event({"choices": [last]})
        usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": number + self.thought}
        usage["completion_tokens_details"] = {"reasoning_tokens": self.thought}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def scripting() -> Iterator[Scripted]:
    """Run a scripted server for this block."""
    one = Scripted()
    routes = [Route(path, partial(send_file, name)) for path, name in FILES.items()]
    routes.append(Route("/v1/models", one.list_models))
    for path in ("/v1/chat/completions", "/v1/completions"):
        routes.append(Route(path, one.answer, methods=["POST"]))
    config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    with running(server) as one.port:
        yield one
        one.go.set()
        server.force_exit = True

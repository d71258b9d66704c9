"""From the worker's thread to a client: streamed or whole, until the client is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_redrafter.server.job import Job
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.replies import Reply

# As nginx has it; nobody reads it.
CLIENT_CLOSED_REQUEST = 499


class Mail:
    """What the worker sends, for the loop that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Part | Refusal | None] = asyncio.Queue()

    def put(self, item: Part | Refusal | None) -> None:
        """Send something, from the worker's thread."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Part]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, Refusal):
                raise item
            yield item


class EventStream(StreamingResponse):
    """A reply as server-sent events, whose texts end where the client is gone.

    Args:
        job: The request and its texts.
        mail: Items from the worker.
        reply: The reply.
    """

    def __init__(self, job: Job, mail: Mail, reply: Reply):
        headers = {"Cache-Control": "no-cache"}
        super().__init__(_events(job, mail, reply), headers=headers, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(job: Job, mail: Mail, reply: Reply) -> AsyncIterator[str]:
    try:
        async for part in mail:
            chunk = reply.chunk(part)
            if chunk is not None:
                yield _event(chunk)
    except Refusal as refusal:
        yield _event(refusal.to_json())
        return
    if job.request.shows_usage:
        yield _event(reply.last_chunk())
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {to_text(value)}\n\n"


async def deliver_whole(request: Request, job: Job, mail: Mail, reply: Reply) -> Response:
    """A reply in one piece, whose texts end where the client is gone.

    Raises:
        Refusal: The request has failed.
    """

    async def collect() -> None:
        async for part in mail:
            reply.add(part)

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, waiting = asyncio.create_task(collect()), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        collecting.result()
        return respond(reply.whole())
    finally:
        job.cancel()
        collecting.cancel()
        waiting.cancel()


def respond(
    value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(to_text(value), status, headers, "application/json")


def to_text(value: dict[str, Any]) -> str:
    """JSON of ASCII characters, which is UTF-8 whatever a text has in it."""
    return json.dumps(value, allow_nan=False)

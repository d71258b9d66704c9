"""Replies, streamed or whole, for as long as the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_redrafter.server.job import Job
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.writer import Usage, Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import TextRequest
from mlx_redrafter.server.wire import respond

# HTTP status of a reply whose client has disconnected, as nginx logs it.
CLIENT_CLOSED_REQUEST = 499
# Seconds without an event after which a stream sends one that says nothing. Clients give up after
# 120 to 300 seconds, proxies after 60.
KEEP_ALIVE = 15.0


class Reply:
    """The reply to one request.

    Args:
        loaded: Model that writes the texts.
        request: The request.
        prompts: Token ids of its prompts.
        writer: Writer of the request's protocol.

    Attributes:
        job: The request's place in the worker, which sends the parts of the reply.
    """

    def __init__(
        self, loaded: LoadedModel, request: TextRequest, prompts: list[list[int]], writer: Writer
    ):
        self.job = Job(loaded, request, prompts, self._receive)
        self.writer = writer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Part | Refusal | None] = asyncio.Queue()
        # Parts so far, added up, by the index of their text.
        self._texts: dict[int, Part] = {}

    async def events(self) -> AsyncIterator[str]:
        """Yield the reply as events, the last of which is an error if the request has failed."""
        sent = self._loop.time()
        while True:
            try:
                left = sent + KEEP_ALIVE - self._loop.time()
                item = await asyncio.wait_for(self._queue.get(), left)
            except TimeoutError:  # also while tokens come without anything to show
                for event in self.writer.keep_alive(self._usage()):
                    yield event
                sent = self._loop.time()
                continue
            for event in self._write(item):
                yield event
                sent = self._loop.time()
            if not isinstance(item, Part):
                return

    def _write(self, item: Part | Refusal | None) -> Iterator[str]:
        """Return the events of an item."""
        if isinstance(item, Part):
            self._add(item)
            return self.writer.add(item, self._usage())
        if isinstance(item, Refusal):
            return self.writer.fail(item)
        return self.writer.end(self._usage())

    async def whole(self, client: Request) -> Response:
        """Return the reply in one piece, or end its texts once the client has disconnected.

        Raises:
            Refusal: The request has failed.
        """

        async def collect() -> None:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, Refusal):
                    raise item
                self._add(item)

        async def wait_until_disconnected() -> None:
            while (await client.receive())["type"] != "http.disconnect":
                pass

        collecting = asyncio.create_task(collect())
        waiting = asyncio.create_task(wait_until_disconnected())
        try:
            await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            collecting.result()
        finally:
            self.job.cancel()
            collecting.cancel()
            waiting.cancel()
        texts = [self._texts[index] for index in sorted(self._texts)]
        return respond(self.writer.whole(texts, self._usage()))

    def _receive(self, item: Part | Refusal | None) -> None:
        """Accept a part, an error or the end; called in the worker's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def _add(self, part: Part) -> None:
        before = self._texts.get(part.index)
        self._texts[part.index] = part.copy() if before is None else before + part

    def _usage(self) -> Usage:
        texts = self._texts.values()
        return Usage(
            num_prompt=sum(map(len, self.job.prompts)),
            num_cached=self.job.num_cached,
            num_tokens=sum(text.num_tokens for text in texts),
            num_reasoning=sum(text.num_reasoning for text in texts),
            num_accepted=sum(text.num_accepted for text in texts),
            num_drafts=sum(text.num_drafts for text in texts),
        )


class EventStream(StreamingResponse):
    """A reply as a stream of events, whose texts end once the client has disconnected."""

    def __init__(self, reply: Reply):
        headers = {"Cache-Control": "no-cache"}
        media_type = reply.writer.media_type
        super().__init__(reply.events(), headers=headers, media_type=media_type)
        self._job = reply.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()

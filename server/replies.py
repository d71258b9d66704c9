"""Replies, streamed or whole, for as long as the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_redrafter.server.job import Item, Job
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.writer import Usage, Writer
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
        start: Time at which the request was read, of the event loop's clock.

    Attributes:
        job: The request's place in the worker, which sends the parts of the reply.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        request: TextRequest,
        prompts: list[list[int]],
        writer: Writer,
        start: float,
    ):
        self.job = Job(loaded, request, prompts, self._receive)
        self.writer = writer
        writer.usage = self.usage
        self._loop = asyncio.get_running_loop()
        # Items that the worker has sent, until they are read.
        self._sent: list[Item] = []
        self._has_sent = asyncio.Event()
        # The newest part of each text, or all its parts added up, by the index of the text.
        self._texts: dict[int, Part] = {}
        # Times of the request, of the end of its preparation, and of its first and its last token.
        self._start, self._begin = start, self._loop.time()
        self._first = self._last = self._begin

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of each step as one text; an error is the last if the request failed."""
        is_open, last = True, self._loop.time()
        while is_open:
            try:
                async with asyncio.timeout_at(last + KEEP_ALIVE):
                    items = await self._next()
                text = "".join(event for item in items for event in self._write(item))
                is_open = isinstance(items[-1], Part)
            except TimeoutError:  # also while tokens come without anything to show
                text = "".join(self.writer.keep_alive())
            if text:
                yield text
                last = self._loop.time()

    def _write(self, item: Item) -> Iterator[str]:
        """Return the events of an item."""
        if isinstance(item, Part):
            self._texts[item.index] = item
            return self.writer.add(item)
        return self.writer.end() if item is None else self.writer.fail(item)

    async def whole(self, client: Request) -> Response:
        """Return the reply in one piece, or end its texts once the client has disconnected.

        Raises:
            Refusal: The request has failed.
        """

        async def collect() -> None:
            while True:
                for item in await self._next():
                    if not isinstance(item, Part):
                        if item is not None:
                            raise item
                        return
                    before = self._texts.get(item.index)
                    self._texts[item.index] = item if before is None else before + item

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
        return respond(self.writer.whole(texts))

    async def _next(self) -> list[Item]:
        """Return the items that have come, at least one, in their order."""
        await self._has_sent.wait()
        self._has_sent.clear()
        items, self._sent = self._sent, []
        return items

    def _receive(self, *items: Item) -> None:
        """Accept the parts of a step, an error or the end; called in the worker's thread."""
        self._loop.call_soon_threadsafe(self._accept, items)

    def _accept(self, items: Sequence[Item]) -> None:
        if isinstance(items[0], Part):
            self._last = self._loop.time()
            self._first = self._last if self._first == self._begin else self._first
        self._sent += items
        self._has_sent.set()

    @property
    def is_whole(self) -> bool:
        """Whether all texts have come to their ends."""
        num_texts = len(self.job.prompts) * self.job.request.num_texts
        return sum(text.finish_reason is not None for text in self._texts.values()) == num_texts

    def usage(self) -> Usage:
        """Return the numbers of the reply so far."""
        texts = self._texts.values()
        return Usage(
            num_prompt=sum(map(len, self.job.prompts)),
            num_cached=self.job.num_cached,
            num_tokens=sum(text.num_tokens for text in texts),
            num_reasoning=sum(text.num_reasoning for text in texts),
            num_accepted=sum(text.num_accepted for text in texts),
            num_drafts=sum(text.num_drafts for text in texts),
            load_seconds=self._begin - self._start,
            prompt_seconds=self._first - self._begin,
            text_seconds=self._last - self._first,
        )


class EventStream(StreamingResponse):
    """A reply as a stream of events, whose texts end once the client has disconnected."""

    def __init__(self, reply: Reply):
        headers = {"Cache-Control": "no-cache"}
        media_type = reply.writer.media_type
        super().__init__(reply.events(), headers=headers, media_type=media_type)
        self._job = reply.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()

"""Replies, streamed or whole, for as long as the client is connected, and the log of requests."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_redrafter.server.fields import respond, shortened
from mlx_redrafter.server.job import Item, Job
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.writer import Usage, Writer
from mlx_redrafter.server.requests import TextRequest

logger = logging.getLogger(__name__)

# HTTP status of a reply whose client has disconnected, as nginx logs it.
CLIENT_CLOSED_REQUEST = 499
# Seconds without an event after which a stream sends one that says nothing. Clients give up after
# 120 to 300 seconds, proxies after 60.
KEEP_ALIVE = 15.0
# Paths that programs ask every few seconds; the log has their errors only.
_FREQUENT = ("/health", "/metrics", "/v1/metrics")


class Reply:
    """The reply to one request, read at the time ``start`` of the event loop's clock.

    ``job`` is the request's place in the worker, which sends the parts of the reply.
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
        if isinstance(item, Part):
            self._texts[item.index] = item
            return self.writer.add(item)
        return self.writer.end() if item is None else self.writer.fail(item)

    async def whole(self, client: Request) -> Response:
        """Return the reply in one piece, or end its texts once the client has disconnected."""

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
        if self._sent and not isinstance(self._sent[-1], Part):
            return  # the server's end has ended the reply, and a step has outlasted that
        if isinstance(items[0], Part):
            self._last = self._loop.time()
            self._first = self._last if self._first == self._begin else self._first
        self._sent += items
        self._has_sent.set()

    @property
    def is_whole(self) -> bool:
        num_texts = len(self.job.prompts) * self.job.request.num_texts
        return sum(text.finish_reason is not None for text in self._texts.values()) == num_texts

    def usage(self) -> Usage:
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
        super().__init__(reply.events(), headers=headers, media_type=reply.writer.media_type)
        self._job = reply.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


@dataclass
class RequestLog:
    """An ASGI application that logs each request of another one in a line, at its end."""

    application: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        status, start = 0, time.monotonic()

        async def note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.application(scope, receive, note_status)
        finally:
            if status != 200 or scope["path"] not in _FREQUENT:
                # Idle connections keep the scope of their last request, and a reply its model.
                reply = scope.get("state", {}).pop("reply", None)
                seconds = time.monotonic() - start
                done = f"{seconds:.2f} s" if reply is None else _describe(reply)
                # As it was sent: what it means could break the line.
                path = shortened(scope["raw_path"].decode("latin-1"))
                logger.info("%s %s %s, %s", scope["method"], path, status or 500, done)


def _describe(reply: Reply) -> str:
    usage = reply.usage()
    seconds, num_tokens = usage.text_seconds, usage.num_tokens
    kept = f" ({usage.num_cached} kept)" if usage.num_cached else ""
    unit = "token" if num_tokens == 1 else "tokens"
    speed = f", {num_tokens / seconds:.1f} tokens/s" if num_tokens > 1 and seconds else ""
    return (
        f"{usage.num_prompt} prompt tokens{kept} in {usage.prompt_seconds:.2f} s, {num_tokens} "
        f"{unit} in {seconds:.2f} s{speed}{'' if reply.is_whole else ', cut'}"
    )

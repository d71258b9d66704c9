"""The side of the server that protocols use: it reads, checks and answers requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.callers import Callers
from mlx_redrafter.server.fields import parse_json
from mlx_redrafter.server.models import Models
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import ContextExceeded, Refusal
from mlx_redrafter.server.replies import EventStream, Reply
from mlx_redrafter.server.requests import TextRequest, encode, fit
from mlx_redrafter.server.stored_responses import StoredResponses
from mlx_redrafter.server.worker import Worker

Read = TypeVar("Read")
# Function that reads a body, given the options of texts for requests that leave them out.
Reader = Callable[[object, GenerationOptions], Read]
# Function that makes the writer of a reply from the name of the model.
MakeWriter = Callable[[str], Writer]

# Size of a body in bytes above which its prompts are encoded one request after the other, so that
# those of short requests need not wait for them.
LARGE_BODY = 1 << 18
# Types of bodies: some clients send none, and curl the last one. A page of another origin, which
# may send that one, is refused before.
_BODY_TYPES = ("", "application/json", "application/x-www-form-urlencoded")


@dataclass
class Service:
    """The functions that the endpoints of a protocol use; all raise `Refusal`."""

    models: Models
    worker: Worker
    callers: Callers
    stored: StoredResponses = field(default_factory=StoredResponses)

    def __post_init__(self) -> None:
        self._encoding = {is_large: asyncio.Lock() for is_large in (False, True)}

    async def read(self, client: Request, reader: Reader[Read]) -> Read:
        """Read the JSON body of a request, next to the event loop."""
        raw = await self._receive(client)
        client.state.is_large = len(raw) > LARGE_BODY
        async with self._encoding[client.state.is_large]:
            return await asyncio.to_thread(lambda: reader(parse_json(raw), self.models.options))

    async def count(self, client: Request, request: TextRequest) -> int:
        """Return the number of tokens of the prompts of a request, whatever the context."""
        _, loaded = await self.models.open(request.model)
        async with self._encoding[client.state.is_large]:
            try:
                # With no context, the pieces of a long text are counted.
                return sum(map(len, await asyncio.to_thread(encode, request, loaded.engine, 0)))
            except ContextExceeded as error:
                return error.length

    async def answer(
        self, client: Request, reader: Reader[tuple[TextRequest, MakeWriter]]
    ) -> Response:
        """Write the texts of a request that a reader reads."""
        return await self.write(client, *await self.read(client, reader))

    async def write(
        self, client: Request, request: TextRequest, make_writer: MakeWriter
    ) -> Response:
        start = time.monotonic()
        model, loaded = await self.models.open(request.model)
        with loaded.preparing():
            async with self._encoding[client.state.is_large]:
                fitted, prompts = await asyncio.to_thread(
                    fit, request, loaded.engine, loaded.context
                )
            writer = make_writer(model.name)
            reply = client.state.reply = Reply(loaded, fitted, prompts, writer, start)
            reply.job.owner = self.callers.identify(client.headers)
            self.worker.submit(reply.job)
        return EventStream(reply) if fitted.is_streamed else await reply.whole(client)

    async def _receive(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _BODY_TYPES:
            raise Refusal("the body must have Content-Type: application/json", status=415)
        limits = self.models.limits
        body, limit, timeout = bytearray(), limits.max_body_bytes, limits.client_timeout
        too_large = Refusal(f"the body must be at most {limit} bytes; shorten it", status=413)
        if int(request.headers.get("content-length", 0)) > limit:  # clients may wait to be asked
            raise too_large
        try:
            async with asyncio.timeout(timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise Refusal(
                f"the body took too long; send it within {timeout:g} seconds", status=408
            ) from error
        return bytes(body)


# A function that answers a request.
Endpoint = Callable[[Service, Request], Awaitable[Response]]
# Endpoints of a protocol by method and path.
Routes = dict[tuple[str, str], Endpoint]

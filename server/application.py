"""The server's paths: they read and check requests, and pass them to the worker."""

from __future__ import annotations

import asyncio
import hmac
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.fields import parse_json
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.protocols import PROTOCOLS
from mlx_redrafter.server.protocols.service import ErrorFormat
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.replies import CLIENT_CLOSED_REQUEST, EventStream, Reply, respond
from mlx_redrafter.server.requests import TextRequest, encode, fit
from mlx_redrafter.server.worker import Worker

Read = TypeVar("Read")
Endpoint = Callable[[Request], Awaitable[Response]]

# Content security policy of the page: it contains all its code, and connects to this server only.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Endpoints:
    """The functions that answer requests.

    Args:
        worker: Worker that writes the texts.
        name: Name of the model.
        defaults: Options of texts for requests that leave them out.
        limits: Limits of requests.
        key: Key that requests must send; None for none.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        defaults: GenerationOptions,
        limits: Limits,
        key: str | None = None,
    ):
        self._worker = worker
        self._name = name
        self._defaults = defaults
        self._limits = limits
        self._key = key
        self._encoding = asyncio.Lock()

    def application(self, origins: Sequence[str] = ()) -> Starlette:
        """Create the ASGI application, which starts and stops the worker.

        Args:
            origins: Origins whose pages may use the server, next to its own.
        """
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        locked = self._locked
        spoken = [
            Route(path, locked(partial(answer, self), protocol.to_error), methods=[method])
            for protocol in PROTOCOLS
            for (method, path), answer in protocol.ROUTES.items()
        ]
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", locked(self._metrics)),
                Route("/v1/models", locked(self._models)),
                *spoken,
            ],
            middleware=[cors] if origins else [],
            exception_handlers={
                HTTPException: _answer_wrong_path,
                ClientDisconnect: _end_disconnected,
                Exception: _fail,
            },
            lifespan=self._run_worker,
        )

    @asynccontextmanager
    async def _run_worker(self, application: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await asyncio.to_thread(self._worker.stop)

    def _locked(self, endpoint: Endpoint, to_error: ErrorFormat = Refusal.to_json) -> Endpoint:
        """Make an endpoint ask for the key, and count its responses.

        Args:
            endpoint: Function that answers a request.
            to_error: Function that formats an error.
        """
        expected = f"Bearer {self._key}".encode()

        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1")
            try:
                if self._key is not None and not hmac.compare_digest(given, expected):
                    raise Refusal(
                        "the key is missing or wrong; send the header Authorization: Bearer KEY",
                        status=401,
                        code="invalid_api_key",
                    )
                response = await endpoint(request)
            except Refusal as refusal:
                response = _refuse(refusal, to_error)
            self._worker.counters.requests[request.url.path, response.status_code] += 1
            return response

        return answer

    async def _page(self, request: Request) -> Response:
        page = files("mlx_redrafter.server").joinpath("page.html").read_bytes()
        headers = {"Content-Security-Policy": PAGE_POLICY}
        return Response(page, media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        if self._worker.is_alive():
            return respond({"status": "ok"})
        return respond({"status": "unavailable"}, 503)

    async def _metrics(self, request: Request) -> Response:
        worker = self._worker
        return Response(worker.counters.render(**worker.gauges()), media_type="text/plain")

    async def _models(self, request: Request) -> Response:
        has_chat = self._worker.engine.tokenizer.has_chat_template
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "mlx_redrafter"}
        return respond({"object": "list", "data": [{**model, "has_chat": has_chat}]})

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._name

    async def read(
        self, client: Request, reader: Callable[[object, GenerationOptions], Read]
    ) -> Read:
        body = parse_json(await self._read(client))
        async with self._encoding:  # one request at a time, in a thread next to the event loop
            return await asyncio.to_thread(reader, body, self._defaults)

    async def count(self, request: TextRequest) -> int:
        async with self._encoding:
            prompts, _ = await asyncio.to_thread(encode, request, self._worker.engine)
        return sum(map(len, prompts))

    async def write(
        self, client: Request, request: TextRequest, make_writer: Callable[[str], Writer]
    ) -> Response:
        if request.model not in (None, self._name):
            raise Refusal(
                f"model must be {self._name!r}, got {reprlib.repr(request.model)}; or leave it out",
                "model",
                status=404,
                code="model_not_found",
            )
        engine, limit = self._worker.engine, self._limits.max_context
        async with self._encoding:
            fitted, prompts = await asyncio.to_thread(fit, request, engine, limit)
        reply = Reply(fitted, prompts, make_writer(self._name))
        self._worker.submit(reply.job)
        return EventStream(reply) if fitted.is_streamed else await reply.whole(client)

    async def _read(self, request: Request) -> bytes:
        """Read the body of a request, within the limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # web pages of other origins need a permission for it
            raise Refusal("the body must have Content-Type: application/json", status=415)
        body, limit = bytearray(), self._limits.max_body_bytes
        try:
            async with asyncio.timeout(self._limits.client_timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise Refusal(
                            f"the body must be at most {limit} bytes; shorten it", status=413
                        )
        except TimeoutError as error:
            raise Refusal(
                f"the body took too long; send it within {self._limits.client_timeout:g} seconds",
                status=408,
            ) from error
        return bytes(body)


def _refuse(refusal: Refusal, to_error: ErrorFormat = Refusal.to_json) -> Response:
    headers = {"Retry-After": "1"} if refusal.status == 429 else {}
    return respond(to_error(refusal), refusal.status, headers)


async def _answer_wrong_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(f"{error.detail}: see docs/server.md for paths", status=error.status_code)
    return respond(refusal.to_json(), error.status_code, dict(error.headers or {}))


async def _end_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _fail(request: Request, error: Exception) -> Response:
    return _refuse(Refusal("the server failed; see its log", status=500))

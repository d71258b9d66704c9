"""The server's paths: they read and check requests, and pass them to the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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
from mlx_redrafter.server.callers import Callers, Gate
from mlx_redrafter.server.fields import parse_json, shortened
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.models import Models
from mlx_redrafter.server.protocols import PROTOCOLS
from mlx_redrafter.server.protocols.service import ErrorFormat, Fitted
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.replies import CLIENT_CLOSED_REQUEST, EventStream, Reply
from mlx_redrafter.server.requests import TextRequest, fit
from mlx_redrafter.server.stored_responses import StoredResponses
from mlx_redrafter.server.wire import respond
from mlx_redrafter.server.worker import Worker

Read = TypeVar("Read")
Endpoint = Callable[[Request], Awaitable[Response]]

# Content security policy of the page: it contains all its code, and connects to this server only.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Size of a body in bytes above which its prompts are encoded one request after the other, so that
# those of short requests need not wait for them.
LARGE_BODY = 1 << 18


class Endpoints:
    """The functions that answer requests.

    Args:
        models: Models that requests may name.
        worker: Worker that writes the texts.
        defaults: Options of texts for requests that leave them out.
        limits: Limits of requests.
        callers: Rules of who may use the server.

    Attributes:
        stored: Responses that clients may continue.
    """

    def __init__(
        self,
        models: Models,
        worker: Worker,
        defaults: GenerationOptions,
        limits: Limits,
        callers: Callers,
    ):
        self._models = models
        self._worker = worker
        self._defaults = defaults
        self._limits = limits
        self._callers = callers
        self.stored = StoredResponses()
        self._encoding = {is_large: asyncio.Lock() for is_large in (False, True)}

    def application(self) -> Starlette:
        """Create the ASGI application, which starts and stops the worker."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            *self._both("/metrics", self._metrics),
            *self._both("/v1/models", self._list_models),
            *self._both("/v1/models/{name:path}", self._describe_model),
        ]
        for protocol in PROTOCOLS:
            for (method, path), answer in protocol.ROUTES.items():
                endpoint = partial(answer, self)
                routes += self._both(path, endpoint, method, protocol.to_error)
        origins = self._callers.origins
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        application = Starlette(
            routes=routes,
            middleware=[
                Middleware(Gate, callers=self._callers, refuse=_refuse),
                *([cors] if origins else []),
            ],
            exception_handlers={
                HTTPException: partial(_answer_wrong_path, _list_paths(routes)),
                ClientDisconnect: _end_disconnected,
                Exception: _fail,
            },
            lifespan=self._run_worker,
        )
        application.router.redirect_slashes = False
        return application

    @asynccontextmanager
    async def _run_worker(self, application: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        unloading = asyncio.create_task(self._models.unload_idle())
        yield
        unloading.cancel()
        await asyncio.to_thread(self._worker.stop)
        await asyncio.to_thread(self._models.store.close)

    def _both(
        self,
        path: str,
        endpoint: Endpoint,
        method: str = "GET",
        to_error: ErrorFormat = Refusal.to_json,
    ) -> list[Route]:
        """Make the routes of a path, with and without ``/v1``, which clients leave out."""
        answer = self._locked(path, endpoint, to_error)
        paths = dict.fromkeys((path, path.removeprefix("/v1")))
        return [Route(one, answer, methods=[method]) for one in paths]

    def _locked(self, path: str, endpoint: Endpoint, to_error: ErrorFormat) -> Endpoint:
        """Make an endpoint ask for the key, format its errors, and count its responses."""

        async def answer(request: Request) -> Response:
            try:
                self._callers.check_key(request.headers)
                response = await endpoint(request)
            except Refusal as refusal:
                response = _refuse(refusal, to_error)
            self._worker.counters.requests[path, response.status_code] += 1
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
        cached = self._models.store.nbytes
        text = worker.counters.render(**worker.gauges(), prompt_cache_bytes=cached)
        return Response(text, media_type="text/plain")

    async def _list_models(self, request: Request) -> Response:
        models = [model.describe() for model in self._models]
        return respond({"object": "list", "data": models})

    async def _describe_model(self, request: Request) -> Response:
        return respond(self._models.find(request.path_params["name"]).describe())

    @property
    def models(self) -> Models:
        """Models that requests may name."""
        return self._models

    async def read(
        self, client: Request, reader: Callable[[object, GenerationOptions], Read]
    ) -> Read:
        raw = await self._read(client)
        client.state.is_large = len(raw) > LARGE_BODY
        async with self._encoding[client.state.is_large]:  # in a thread next to the event loop
            return await asyncio.to_thread(lambda: reader(parse_json(raw), self._defaults))

    async def fit(self, client: Request, request: TextRequest) -> Fitted:
        model, loaded = await self._models.open(request.model)
        async with self._encoding[client.state.is_large]:
            fitted, prompts = await asyncio.to_thread(
                fit, request, loaded.engine, self._limits.max_context
            )
        return Fitted(model, loaded, fitted, prompts)

    async def write(
        self, client: Request, request: TextRequest, make_writer: Callable[[str], Writer]
    ) -> Response:
        model, loaded, fitted, prompts = await self.fit(client, request)
        reply = Reply(loaded, fitted, prompts, make_writer(model.name))
        reply.job.owner = self._callers.identify(client.headers)
        self._worker.submit(reply.job)
        return EventStream(reply) if fitted.is_streamed else await reply.whole(client)

    async def _read(self, request: Request) -> bytes:
        """Read the body of a request, within the limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Web pages of other origins need a permission for it; some clients of Ollama send no type.
        if kind not in ("", "application/json"):
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


def _list_paths(routes: list[Route]) -> str:
    paths = (route.path for route in routes if route.path.startswith(("/v1", "/api")))
    return ", ".join(dict.fromkeys(paths))


async def _answer_wrong_path(paths: str, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(
        f"{error.detail}: {request.method} {shortened(request.url.path)}; the paths are {paths}",
        status=error.status_code,
    )
    return respond(refusal.to_json(), error.status_code, dict(error.headers or {}))


async def _end_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _fail(request: Request, error: Exception) -> Response:
    return _refuse(Refusal("the server failed; see its log", status=500))

"""The server's paths: those of the protocols, the models, the chat page and the server itself."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from mlx_redrafter.server.callers import Gate
from mlx_redrafter.server.fields import respond, shortened
from mlx_redrafter.server.models import Model
from mlx_redrafter.server.protocols import (
    anthropic,
    ollama,
    openai_chat,
    openai_completions,
    responses,
)
from mlx_redrafter.server.protocols.openai_fields import format_options
from mlx_redrafter.server.protocols.service import Endpoint, Service
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.replies import CLIENT_CLOSED_REQUEST, RequestLog

# Files of the chat page by their paths; they need no key.
FILES = {
    "/": "page.html",
    **{f"/{name}": name for name in ("page.js", "marked.umd.js", "purify.min.js")},
}
# Headers of these files. Scripts and requests are those of this server only, and only the sanitiser
# may make elements out of text.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# Beginnings of the paths that the answer to a wrong one names.
SHOWN = ("/v1", "/api", "/health", "/metrics")


def make_application(service: Service) -> Starlette:
    """Create the ASGI application, which starts and stops the worker."""
    routes = [
        *(Route(path, partial(send_file, name)) for path, name in FILES.items()),
        Route("/health", partial(_health, service)),
        *_both(service, "/metrics", _metrics),
        *_both(service, "/v1/models", _list_models),
        *_both(service, "/v1/models/{name:path}", _describe_model),
    ]
    for protocol in (openai_chat, openai_completions, responses, anthropic, ollama):
        for (method, path), endpoint in protocol.ROUTES.items():
            routes += _both(service, path, endpoint, method)
    shown = [route.path_format for route in routes if route.path.startswith(SHOWN)]
    origins = service.callers.origins
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    gate = Middleware(Gate, callers=service.callers, refuse=_refuse)
    application = Starlette(
        routes=routes,
        middleware=[Middleware(RequestLog), gate, *([cors] if origins else [])],
        exception_handlers={
            HTTPException: partial(_answer_wrong_path, ", ".join(dict.fromkeys(shown))),
            ClientDisconnect: _end_disconnected,
            Exception: _fail,
        },
        lifespan=partial(_run_worker, service),
    )
    application.router.redirect_slashes = False
    return application


@asynccontextmanager
async def _run_worker(service: Service, application: Starlette) -> AsyncIterator[None]:
    service.worker.start()
    unloading = asyncio.create_task(service.models.unload_idle())
    yield
    unloading.cancel()
    await asyncio.to_thread(service.worker.stop)
    await asyncio.to_thread(service.models.store.close)


def _both(service: Service, path: str, endpoint: Endpoint, method: str = "GET") -> list[Route]:
    """Make routes of a path, with and without ``/v1``, that ask for the key and count responses."""

    async def answer(request: Request) -> Response:
        try:
            service.callers.check_key(request.headers)
            response = await endpoint(service, request)
        except Refusal as refusal:
            response = _refuse(refusal, request.scope)
        service.worker.counters.requests[path, response.status_code] += 1
        return response

    paths = dict.fromkeys((path, path.removeprefix("/v1")))
    return [Route(one, answer, methods=[method]) for one in paths]


async def send_file(name: str, request: Request) -> Response:
    content = files("mlx_redrafter.server").joinpath("page", name).read_bytes()
    kind = "text/javascript" if name.endswith(".js") else "text/html"
    return Response(content, headers=HEADERS, media_type=kind)


async def _health(service: Service, request: Request) -> Response:
    if service.worker.is_ready:
        return respond({"status": "ok"})
    return respond({"status": "unavailable"}, 503)


async def _metrics(service: Service, request: Request) -> Response:
    worker, cached = service.worker, service.models.store.nbytes
    text = worker.counters.render(**worker.gauges(), prompt_cache_bytes=cached)
    return Response(text, media_type="text/plain")


async def _list_models(service: Service, request: Request) -> Response:
    entries = [_describe(service, model) for model in service.models]
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}  # as at Anthropic
    return respond({"object": "list", "data": entries, "has_more": False, **ends})


async def _describe_model(service: Service, request: Request) -> Response:
    return respond(_describe(service, service.models.find(request.path_params["name"])))


def _describe(service: Service, model: Model) -> dict[str, Any]:
    return {**model.describe(), "defaults": format_options(service.models.options)}


def _refuse(refusal: Refusal, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """Format an error as the protocol of a request does."""
    path = scope["path"].removeprefix("/v1")
    if path.startswith("/api/"):
        error = ollama.to_error(refusal)
    elif path.startswith("/messages") or "anthropic-version" in Headers(scope=scope):
        error = anthropic.to_error(refusal)
    else:
        error = refusal.to_json()
    again = {"Retry-After": "1"} if refusal.status == 429 else {}
    return respond(error, refusal.status, {**again, **(headers or {})})


async def _answer_wrong_path(paths: str, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(
        f"{error.detail}: {request.method} {shortened(request.url.path)}; the paths are {paths}",
        status=error.status_code,
    )
    return _refuse(refusal, request.scope, error.headers)


async def _end_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _fail(request: Request, error: Exception) -> Response:
    return _refuse(Refusal("the server failed; see its log", status=500), request.scope)

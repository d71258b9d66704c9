"""Checks of a request's caller, before anything else reads the request.

A web page of any site can send requests to a server on the user's own machine. The browser tells
the page's origin, and the host that the page believes to talk to: a foreign host is a foreign name
that leads to this machine (DNS rebinding).
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_redrafter.server.refusals import Refusal

# Hosts that always lead to the machine of the browser.
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
# Seconds in which the rest of a request may arrive that is answered before its end.
DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class Callers:
    """Rules of who may use the server.

    It listens at ``host``. Clients may name it by ``hosts``, too, and ``origins`` are those of the
    web pages that may use it next to its own, "*" for all. ``key`` is None if none is needed.
    """

    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    key: str | None = None

    def check_host(self, headers: Headers) -> None:
        """Refuse a ``Host`` that is not this server's, and pages of another ``Origin``."""
        host = headers.get("host", "")
        if host and not self._is_own(_name_of(host)):
            raise Refusal(
                f"Host must be the address of this server or localhost, got {host[:100]!r}; to "
                "serve under this name, start with --allow-host NAME",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin", "")
        is_own = not origin or (host and origin.partition("://")[2].lower() == host.lower())
        if not is_own and "*" not in self.origins and origin not in self.origins:
            raise Refusal(
                f"web pages of {origin[:100]!r} may not use this server; to allow them, start "
                "with --allow-origin ORIGIN",
                status=403,
                code="origin_not_allowed",
            )

    def check_key(self, headers: Headers) -> None:
        """Refuse a wrong key in ``Authorization: Bearer KEY`` or Anthropic's ``x-api-key``."""
        if self.key is None:
            return
        expected = self.key.encode()
        if not any([hmac.compare_digest(one, expected) for one in _keys(headers)]):
            raise Refusal(
                "the key is missing or wrong; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    def identify(self, headers: Headers) -> str:
        """Return the identity of a client: that of the key it sends."""
        key = next(filter(None, _keys(headers)), b"")
        return hashlib.sha256(key).hexdigest()

    def _is_own(self, name: str) -> bool:
        names = {self.host.lower(), *map(str.lower, self.hosts)} | LOCAL_HOSTS
        # No page has an address instead of a name, unless it comes from that address.
        return name in names or (self.host in ("0.0.0.0", "::", "") and _is_address(name))


@dataclass
class Gate:
    """An ASGI application that checks the caller first, and ends requests answered too early.

    A response to a request whose body has not arrived waits for the rest for `DRAIN_SECONDS` and
    drops it. If there is still more to come, the connection ends with the response.
    """

    application: ASGIApp
    callers: Callers
    refuse: Callable[[Refusal, Scope], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        # A request for a proxy has the whole address; clients add slashes to what they are given.
        path = re.sub("^https?://[^/]*", "", scope["path"]).rstrip("/") or "/"
        scope = {**scope, "path": path}
        headers = Headers(scope=scope)
        body = _Body(headers, receive)

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.drain():
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            self.callers.check_host(headers)
        except Refusal as refusal:
            await self.refuse(refusal, scope)(scope, body.receive, send_after_body)
            return
        await self.application(scope, body.receive, send_after_body)


class _Body:
    """The body of one request, as far as it has arrived."""

    def __init__(self, headers: Headers, receive: Receive):
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._is_whole = not has_body
        self._is_asked_for = "expect" not in headers
        self._receive = receive

    async def receive(self) -> Message:
        self._is_asked_for = True
        message = await self._receive()
        if not message.get("more_body", False):
            self._is_whole = True
        return message

    async def drain(self) -> bool:
        """Drop the rest; return whether all of it has arrived."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                # A client that waits to be asked for its body does not send it.
                while self._is_asked_for and not self._is_whole:
                    await self.receive()
        return self._is_whole


def _keys(headers: Headers) -> list[bytes]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return [key.encode("latin-1") for key in keys]


def _name_of(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    has_port = colon and port.isdecimal() and (":" not in name or name.endswith("]"))
    return (name if has_port else host.lower()).removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False

"""The log of requests: one line for each, at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_redrafter.server.fields import shortened
from mlx_redrafter.server.replies import Reply

logger = logging.getLogger(__name__)

# Paths that programs ask every few seconds; the log has their errors only.
_FREQUENT = ("/health", "/metrics", "/v1/metrics")


@dataclass
class RequestLog:
    """An ASGI application that logs the requests of another one."""

    application: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and log it."""
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

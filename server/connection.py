"""One connection: patience with slow clients, and OpenAI's error object for what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.refusals import Refusal


class Connection(H11Protocol):
    """uvicorn's connection, cut where a client dawdles over its headers or does not read on.

    Attributes:
        patience: Seconds for either; the time for a body is the application's.
    """

    patience = Limits.patience
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and expect headers."""
        super().connection_made(transport)
        self._expect(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._expect(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; headers of another request may begin."""
        if self.conn.their_state is h11.IDLE and self._deadline is None:
            self._expect(True)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._expect(False)

    def pause_writing(self) -> None:
        """Expect the client to read what was sent."""
        super().pause_writing()
        self._expect(True)

    def resume_writing(self) -> None:
        """Go on: it has."""
        super().resume_writing()
        self._expect(False)

    def send_400_response(self, msg: str) -> None:
        """Answer to what is no request, or one with too long a header."""
        body = json.dumps(Refusal(msg).to_json()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            events: list[Any] = [
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            self.transport.write(b"".join(filter(None, map(self.conn.send, events))))
        self.transport.close()

    def _expect(self, something: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        loop, abort = self.loop, self.transport.abort
        self._deadline = loop.call_later(self.patience, abort) if something else None

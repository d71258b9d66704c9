"""JSON as it is sent: as a response, or as a server-sent event."""

import json
from typing import Any

from starlette.responses import Response

# Writes JSON in ASCII characters, which any text can be encoded in.
to_text = json.JSONEncoder(allow_nan=False).encode


def event(value: dict[str, Any], name: str = "") -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_text(value)}\n\n"


def respond(
    value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(to_text(value), status, headers, "application/json")

"""Requests that agents' programs and packages have sent are answered as they want it."""

import json
import re
from typing import Any

from tests.helpers.models import shared_path
from tests.server.serving import Served


def _captured() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(shared_path("agents").glob("*.json")):
        content = json.loads(path.read_text())
        for i, one in enumerate(content if isinstance(content, list) else [content]):
            found.append((f"{path.stem}[{i}]", one))
    for _, one in found:
        tools = (one["body"] or {}).get("tools")
        if isinstance(tools, str):  # "<same tools as in 01>"
            number = re.search(r"\d+", tools)
            assert number is not None
            same = next(other for name, other in found if name.startswith(number[0]))
            one["body"]["tools"] = same["body"]["tools"]
    return found


def test_every_captured_request_is_answered(calling: Served) -> None:
    for name, one in _captured():
        path, body = one["path"], one["body"]
        status, reply = calling.send(path, body)
        assert status == 200, (name, reply)
        if isinstance(reply, str) and path.startswith(
            ("/v1/messages", "/v1/responses", "/v1/chat")
        ):
            lines = [line for line in reply.splitlines() if line.startswith(("data: {", "{"))]
            last = json.loads(lines[-1].removeprefix("data: "))
            if path.startswith("/v1/chat"):
                assert last["choices"] == [] or last["choices"][0]["finish_reason"], name
            else:
                assert last["type"] in ("message_stop", "response.completed"), name


def test_a_session_of_claude_code_shares_its_beginning(calling: Served) -> None:
    """Marks of caches move, and a line about billing differs from session to session."""
    captured = dict(_captured())
    first = captured["01_claude_code_first[0]"]["body"]
    counted: list[Any] = []
    for hash_ in ("476", "e12"):
        body = json.loads(json.dumps(first))
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.197.{hash_};"
        body.pop("stream")
        body["system"][1].pop("cache_control", None)
        counted.append(calling.send("/v1/messages", body)[1]["usage"])
    read, again = (usage["cache_read_input_tokens"] for usage in counted)
    assert again == counted[0]["input_tokens"] - 1 + read

"""Requests that agents, packages and mlx-lm's own server tests send are answered as they want."""

import json
import re
from typing import Any

import pytest

from tests.helpers.models import shared_path
from tests.server.serving import PATH, events


def _captured() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(shared_path("agents").glob("*.json")):
        content = json.loads(path.read_text())
        for i, one in enumerate(content if isinstance(content, list) else [content]):
            found.append((f"{path.stem}[{i}]", one))
    for _, one in found:
        tools = (one["body"] or {}).get("tools")
        if isinstance(tools, str):  # "<same tools as in 01>"
            (number,) = re.findall(r"\d+", tools)
            same = next(other for name, other in found if name.startswith(number))
            one["body"]["tools"] = same["body"]["tools"]
    return found


def test_every_captured_request_is_answered(calling):
    for name, one in _captured():
        path, body = one["path"], one["body"]
        status, reply = calling.send(path, body)
        assert status == 200, (name, reply)
        if isinstance(reply, str) and path.startswith("/v1/"):
            last = events(reply)[-1]
            if path.startswith("/v1/chat"):
                assert last["choices"] == [] or last["choices"][0]["finish_reason"], name
            else:
                assert last["type"] in ("message_stop", "response.completed"), name


def test_a_session_of_claude_code_shares_its_beginning(calling):
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


# Of mlx-lm's server tests, with the model names that they send.
SAMPLED = {"max_tokens": 10, "temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2}
SYSTEM = {"role": "system", "content": "BE SHORT."}
QUESTION = {"role": "user", "content": "WHAT IS 2+3?"}


def _call(arguments: Any, content: Any = None) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"type": "function", "id": "123", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


RESULT = {"role": "tool", "content": "5", "tool_call_id": "123"}
PARTS = [
    {**one, "content": [{"type": "text", "text": one["content"]}]} for one in (SYSTEM, QUESTION)
]
CHATS: dict[str, dict[str, Any]] = {
    "texts": {**SAMPLED, "messages": [SYSTEM, QUESTION]},
    "parts": {**SAMPLED, "messages": PARTS},
    "no content": {**SAMPLED, "messages": [QUESTION, _call('{"a": 2, "b": 3}'), RESULT]},
    "an object": {**SAMPLED, "messages": [QUESTION, _call({"a": 2, "b": 3}, ""), RESULT]},
    "greedy": {"max_tokens": 10, "temperature": 0.0, "messages": [SYSTEM, QUESTION]},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_mlx_lm(served, name):
    body, path = {**CHATS[name], "seed": 3}, "/chat/completions"
    status, reply = served.send(path, {**body, "model": "chat_model"})
    assert status == 200
    assert reply["id"]
    assert reply["usage"]["completion_tokens"] > 0
    content = reply["choices"][0]["message"]["content"]
    assert content == served.send(path, body)[1]["choices"][0]["message"]["content"]
    _, stream = served.send(path, {**body, "model": "chat_model", "stream": True})
    choices = [one["choices"] for one in events(stream)]
    assert all(len(one) == 1 for one in choices)
    assert "".join(one[0]["delta"]["content"] for one in choices) == content


def test_completions_of_mlx_lm(served):
    body: dict[str, Any] = {**SAMPLED, "model": "default_model", "prompt": "ONCE UPON A TIME"}
    body |= {"repetition_context_size": 20, "seed": 999, "stop": "stop sequence"}
    assert served.text(**body) == served.text(**body)
    status, reply = served.send(PATH, {**body, "max_tokens": 0})
    assert (status, reply["error"]["param"]) == (400, "max_tokens")
    status, reply = served.send("/v1/models")
    assert (status, reply["object"], reply["data"][0]["object"]) == (200, "list", "model")

"""Requests of mlx-lm's own server tests, with the model names that they send."""

import json
from typing import Any

import pytest

from tests.server.serving import Served

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
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_chats(served: Served, name: str, path: str) -> None:
    body = {**CHATS[name], "seed": 3}
    status, reply = served.send(path, {**body, "model": "chat_model"})
    assert status == 200
    assert reply["id"]
    assert reply["usage"]["completion_tokens"] > 0
    content = reply["choices"][0]["message"]["content"]
    assert content == served.send(path, body)[1]["choices"][0]["message"]["content"]
    status, events = served.send(path, {**body, "model": "chat_model", "stream": True})
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"] for line in lines]
    assert all(len(one) == 1 for one in choices)
    assert "".join(one[0]["delta"]["content"] for one in choices) == content


def test_completions(served: Served) -> None:
    body: dict[str, Any] = {**SAMPLED, "model": "default_model", "prompt": "ONCE UPON A TIME"}
    body |= {"repetition_context_size": 20, "seed": 999, "stop": "stop sequence"}
    texts = [served.send("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    status, reply = served.send("/v1/completions", {**body, "max_tokens": 0})
    assert (status, reply["error"]["param"]) == (400, "max_tokens")
    status, reply = served.send("/v1/models")
    assert (status, reply["object"], reply["data"][0]["object"]) == (200, "list", "model")

"""Streams of every protocol: the arguments of a call come in pieces, and are the answer's."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.calling import calling_engine
from tests.server.serving import CITY, UNLIMITED, events, serving

SCHEMA = CITY | {"properties": {"city": {"type": "string", "minLength": 1, "maxLength": 20}}}
MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOL = {"name": "weather"}


def _read_chat(events: list[Any]) -> list[str]:
    deltas = [one["choices"][0]["delta"] for one in events]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [piece["index"] for piece in pieces] == [0] * len(pieces)
    assert pieces[0]["function"]["name"] == "weather"
    assert pieces[0]["id"]
    assert all("id" not in piece and "name" not in piece["function"] for piece in pieces[1:])
    return [piece["function"]["arguments"] for piece in pieces]


def _read_messages(events: list[Any]) -> list[str]:
    kinds = [one["type"] for one in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    return [one["partial_json"] for one in deltas]


def _read_responses(events: list[Any]) -> list[str]:
    pieces = [
        one["delta"] for one in events if one["type"].endswith("function_call_arguments.delta")
    ]
    (done,) = (one["item"] for one in events if one["type"] == "response.output_item.done")
    assert done["arguments"] == "".join(pieces)
    assert done["status"] == "completed"
    return pieces


def _read_ollama(events: list[Any]) -> list[str]:
    calls = [call for one in events for call in one["message"].get("tool_calls", ())]
    return [json.dumps(call["function"]["arguments"]) for call in calls]


FUNCTION = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
# Path, body, arguments of the whole answer and pieces of the stream, of each protocol.
PROTOCOLS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [FUNCTION], "max_tokens": 200},
        lambda whole: whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
        _read_chat,
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{**TOOL, "input_schema": SCHEMA}], "max_tokens": 200},
        lambda whole: json.dumps(whole["content"][0]["input"]),
        _read_messages,
    ),
    "responses": (
        "/v1/responses",
        {"input": "Weather?", "tools": [{**TOOL, "type": "function", "parameters": SCHEMA}]},
        lambda whole: whole["output"][0]["arguments"],
        _read_responses,
    ),
    "ollama": (
        "/api/chat",
        {"messages": MESSAGES, "tools": [FUNCTION]},
        lambda whole: json.dumps(whole["message"]["tool_calls"][0]["function"]["arguments"]),
        _read_ollama,
    ),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_arguments_come_in_pieces(calling, name):
    path, body, read_whole, read_pieces = PROTOCOLS[name]
    status, whole = calling.send(path, {**body, "stream": False})
    assert status == 200, whole
    pieces = read_pieces(events(calling.send(path, {**body, "stream": True})[1]))
    assert json.loads("".join(pieces)) == json.loads(read_whole(whole))
    assert len(pieces) >= (1 if name == "ollama" else 3)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_cut_call_is_no_error(calling, name):
    path, body, _, _ = PROTOCOLS[name]
    limit = {"responses": "max_output_tokens"}.get(name, "max_tokens")
    cut = {"options": {"num_predict": 45}} if name == "ollama" else {limit: 45}
    for streams in (False, True):
        status, answer = calling.send(path, {**body, **cut, "stream": streams})
        assert status == 200
        text = answer if streams else json.dumps(answer)
        assert any(word in text for word in ('"length"', '"max_tokens"', "incomplete")), text
        assert "error" not in text.replace('"error":null', "").replace('"error": null', "")


def _asking(body: dict[str, Any], schema: dict[str, Any]) -> Any:
    return json.loads(json.dumps(body).replace(json.dumps(SCHEMA), json.dumps(schema)))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_schema_that_no_text_fits(calling, name):
    path, body, _, _ = PROTOCOLS[name]
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    schema = {**SCHEMA, "properties": {"city": {"$ref": "#/$defs/a"}}, "$defs": circle}
    for streams in (False, True):
        status, answer = calling.send(path, {**_asking(body, schema), "stream": streams})
        assert status == (200 if streams else 400)
        error = events(answer)[-1] if streams else answer
        error = error.get("response", error)["error"]
        message = error if name == "ollama" else error["message"]
        assert message.startswith("tools: no token may follow")


@pytest.mark.parametrize("kind", ["json_tools", "gemma4"])
def test_hundreds_of_arguments_that_may_be_missing(kind):
    path, body, read_whole, _ = PROTOCOLS["chat"]
    more = {f"more_{i}": {"type": "integer"} for i in range(300)}
    schema = {**SCHEMA, "properties": {**more, **SCHEMA["properties"]}}
    with serving(calling_engine(kind), defaults=UNLIMITED) as one:
        status, whole = one.send(path, {**_asking(body, schema), "max_tokens": 400})
    assert status == 200, whole
    assert "city" in json.loads(read_whole(whole))

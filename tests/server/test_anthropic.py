"""Anthropic's protocol, spoken by its own client over a socket."""

import time
from itertools import chain
from typing import Any

import pytest

from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.anthropic import MessageWriter, read
from mlx_redrafter.server.protocols.writer import Usage
from tests.server.serving import CITY, KEY, Served, events

DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMA = CITY | {"properties": {**CITY["properties"], "days": DAYS}, "required": ["city", "days"]}
TOOL = {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}
ASKED = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Weather?"}]}


@pytest.fixture
def client(calling: Served) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the client of this protocol")
    with anthropic.Anthropic(base_url=calling.root, api_key=KEY, max_retries=0) as one:
        yield one


def test_a_tool_is_called_and_its_result_answered(client):
    first = client.messages.create(**ASKED, system="Be short.", tools=[TOOL])
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.name == "get_weather"
    assert call.input["city"] in ("Rome", "Oslo")
    assert 1 <= call.input["days"] <= 9
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**{**ASKED, "messages": messages}, tools=[TOOL])
    assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > 0
    assert second.usage.output_tokens == 6


def test_a_stream_is_the_same_answer(client):
    whole = client.messages.create(**ASKED, tools=[TOOL])
    with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
        kinds = [one.type for one in stream]
        final = stream.get_final_message()
    assert final.content[0].input == whole.content[0].input
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    with client.messages.stream(**ASKED, stop_sequences=["n"]) as stream:
        assert "".join(stream.text_stream) == "Do"
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "n")


TURNS = [{"role": role, "content": "W"} for role in ("user", "assistant")]
REDACTED = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "W"}]}
NO_TYPE = {"role": "assistant", "content": [{"text": "W"}]}
UNKNOWN = {"type": "tool_result", "tool_use_id": "toolu_1"}
NO_SCHEMA = {**TOOL, "input_schema": {"properties": {"a": {"type": "nothing"}}}}
FLY = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}}


def _asking(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("colour is not supported", {"colour": "red"}),
    ("max_tokens must be", {"max_tokens": 0}),
    ("reads neither images", _asking({"type": "image", "source": {}})),
    ("the id of a call before it", _asking(UNKNOWN)),
    ("get_weather: grammar cannot be used", {"tools": [NO_SCHEMA]}),
    ("tools[0].type must be", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tool_choice names 'fly'", FLY),
    ("prompt is too long: ", {"messages": [*TURNS * 8_000, TURNS[0]]}),
    ("must end with a message of the user", {"messages": TURNS}),
    ("must end with a message of the user", {"messages": [REDACTED]}),
    ("messages[0].content must be", _asking()),
    ("messages[0].content[0].type must be", {"messages": [NO_TYPE, *ASKED["messages"]]}),
]


@pytest.mark.parametrize(("message", "fields"), BAD, ids=[message for message, _ in BAD])
def test_errors_have_its_shape(calling, message, fields):
    status, reply = calling.send("/v1/messages", {**ASKED, **fields})
    found = status, reply["type"], reply["error"]["type"]
    assert found == (400, "error", "invalid_request_error")
    assert message in reply["error"]["message"]


def test_max_tokens_may_be_left_out():
    request, _ = read({"messages": ASKED["messages"]}, GenerationOptions(max_tokens=7))
    assert request.options.max_tokens == 7


def test_many_texts_are_read_in_no_time():
    messages = [{"role": "user", "content": ["A"] * 500_000}]
    start = time.monotonic()
    request, _ = read({"messages": messages}, GenerationOptions())
    assert time.monotonic() - start < 5
    assert request.messages[0]["content"].count("A\n\nA") == 250_000


def test_thinking_comes_first():
    """The events of a model that thinks, from parts as the worker makes them."""
    writer = MessageWriter("tiny")
    writer.usage = lambda: Usage(9, 0, 3)
    parts = [
        Part(0, False, 1, 0, 0, 1, reasoning="Hm"),
        Part(0, False, 2, 0, 0, 2, content="Yes"),
        Part(0, False, 3, 0, 0, 3, finish_reason="length"),
    ]
    sent = [*writer.keep_alive(), *chain(*map(writer.add, parts)), *writer.end()]
    found = events("".join(sent))
    blocks = [one["content_block"]["type"] for one in found if "content_block" in one]
    assert blocks == ["text", "thinking", "text"]
    assert [one["index"] for one in found if one["type"] == "content_block_stop"] == [0, 1, 2]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_named_tool_is_called_once(calling):
    """Without ``disable_parallel_tool_use``; other required calls may be several."""
    chosen = {"tool_choice": {"type": "tool", "name": "get_weather"}}
    _, reply = calling.send("/v1/messages", {**ASKED, "tools": [TOOL], **chosen})
    assert [block["type"] for block in reply["content"]] == ["tool_use"]
    assert reply["stop_reason"] == "tool_use"


def test_models_are_listed(client, calling):
    client.messages.create(**ASKED)
    (model,) = client.models.list()
    context = calling.engine.target.context_length
    assert (model.type, model.display_name, model.lifecycle) == ("model", "tiny", "active")
    assert (model.max_input_tokens, model.created_at.year) == (context - 1, 1970)
    assert client.models.retrieve("tiny") == model


def test_tokens_are_counted(client, calling):
    """Beyond the context, too."""
    encode = calling.engine.tokenizer.encode
    counted = client.messages.count_tokens(model="tiny", messages=ASKED["messages"], tools=[TOOL])
    prompt = "get_weather;[user]Weather?<ask>"
    assert counted.input_tokens == len(encode(prompt, add_special_tokens=False))
    for count in 1, 8_000:
        messages = [*TURNS * count, TURNS[0]]
        asked = {"model": "tiny", "messages": messages}
        expected = len(encode_chat(calling.engine.tokenizer, messages))
        assert abs(client.messages.count_tokens(**asked).input_tokens - expected) <= count // 100

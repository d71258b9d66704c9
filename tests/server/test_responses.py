"""OpenAI's responses, asked for by its own client over a socket."""

import json
from typing import Any

import openai
import pytest

from tests.server.serving import CITY, Served

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": CITY,
    "strict": True,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "Weather?"}


@pytest.fixture
def client(calling: Served) -> Any:
    with calling.openai() as one:
        yield one


def test_a_call_and_its_result_in_a_stored_conversation(client):
    first = client.responses.create(**ASKED, tools=[TOOL], instructions="Be short.")
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    second = client.responses.create(
        model="tiny", previous_response_id=first.id, input=[result], tools=[TOOL]
    )
    assert second.output_text == "Done."
    assert second.usage.output_tokens == 6
    whole = client.responses.create(
        model="tiny",
        instructions="Be short.",
        input=[{"role": "user", "content": "Weather?"}, call.model_dump(), result],
        tools=[TOOL],
        store=False,
    )
    assert whole.output_text == "Done."
    assert client.responses.retrieve(second.id).output_text == "Done."
    client.responses.delete(second.id)
    for response_id in (whole.id, second.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_a_conversation_goes_on_after_a_call_that_is_cut(client):
    asked = {**ASKED, "tools": [TOOL], "tool_choice": "required"}
    answers = (client.responses.create(**asked, max_output_tokens=n) for n in range(8, 80, 4))
    cut = next(one for one in answers if one.output and one.output[0].type == "function_call")
    (call,) = cut.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "No JSON."}
    stored = client.responses.create(model="tiny", previous_response_id=cut.id, input=[result])
    question = {"role": "user", "content": ASKED["input"]}
    sent = client.responses.create(model="tiny", input=[question, call.model_dump(), result])
    assert stored.usage.input_tokens == sent.usage.input_tokens > cut.usage.input_tokens


def test_a_stream_is_the_same_response(client):
    for options, kind in ({}, "message"), ({"tools": [TOOL]}, "function_call"):
        whole = client.responses.create(**ASKED, **options)
        with client.responses.stream(**ASKED, **options) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert [one.type for one in final.output] == [kind]
        assert final.output_text == whole.output_text
        assert events[-1].type == "response.completed"
        done = [one.item for one in events if one.type == "response.output_item.done"]
        assert [one.id for one in done] == [one.id for one in final.output]


def test_formats_and_lengths(client):
    form = {"type": "json_schema", "name": "city", "schema": CITY}
    made = client.responses.create(**ASKED, text={"format": form, "verbosity": "low"})
    assert json.loads(made.output_text)["city"] in ("Rome", "Oslo")
    cut = client.responses.create(**ASKED, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [one.status for one in cut.output] == ["incomplete"]
    more = client.responses.create(model="tiny", input="Go on", previous_response_id=cut.id)
    assert more.usage.input_tokens > cut.usage.input_tokens + 2, "it has read the cut answer"
    chosen = client.responses.create(
        **ASKED,
        tools=[TOOL, {**TOOL, "name": "fly"}],
        tool_choice={"type": "function", "name": "fly"},
    )
    assert [one.name for one in chosen.output] == ["fly"]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
NO_CALL = {"type": "function_call_output", "call_id": "c", "output": ""}
NO_FORMAT = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
NO_TOOL = {**TOOL, "name": "fly", "parameters": {"type": 1}}
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("colour", "is not supported", {"colour": "red"}),
    ("input", "must have at least one item", {"input": []}),
    ("input[0].content", "neither images nor files", {"input": [IMAGE]}),
    ("input[0].type", "must be", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].call_id", "id of a call before it", {"input": [NO_CALL]}),
    ("previous_response_id", "id of a stored response", {"previous_response_id": "resp_1"}),
    ("tools[0].type", "must be", {"tools": [{"type": "telepathy"}]}),
    ("tools", "fly: ", {"tools": [NO_TOOL]}),
    ("text.format", "Invalid type", {"text": NO_FORMAT}),
]


@pytest.mark.parametrize(("param", "message", "fields"), BAD)
def test_errors_have_its_shape(calling, param, message, fields):
    status, reply = calling.send("/v1/responses", {**ASKED, **fields})
    assert (status, reply["error"]["param"]) == (400, param)
    assert message in reply["error"]["message"]
    assert calling.send("/v1/responses/resp_1")[0] == 404, "the same id in a path"

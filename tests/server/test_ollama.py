"""Ollama's protocol, spoken by its own client over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.calling import calling_engine
from tests.server.serving import KEY, UNLIMITED, Served, serving

pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(calling_engine(), defaults=UNLIMITED) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Any:
    ollama = pytest.importorskip("ollama", reason="the client of this protocol")
    address = served.url.removesuffix("/v1")
    one = ollama.Client(host=address, headers={"Authorization": f"Bearer {KEY}"})
    yield one
    one._client.close()


def test_chats_with_and_without_tools(client: Any) -> None:
    first = client.chat("tiny", MESSAGES, tools=[TOOL])
    (call,) = first.message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.arguments["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny."}
    messages = [*MESSAGES, first.message, result]
    second = client.chat("tiny", messages, tools=[TOOL], keep_alive="5m")
    assert (second.message.content, second.done_reason) == ("Done.", "stop")
    assert (second.eval_count, second.prompt_eval_count > 0) == (6, True)
    parts = list(client.chat("tiny", messages, tools=[TOOL], stream=True))
    assert "".join(one.message.content for one in parts) == "Done."
    assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
    made = client.chat("tiny", MESSAGES, format=SCHEMA, options={"num_ctx": 4096, "seed": 1})
    assert json.loads(made.message.content)["city"] in ("Rome", "Oslo")


def test_prompts_are_continued(client: Any, served: Served) -> None:
    assert client.generate("tiny", "Hello", system="Be short.").response == "Done."
    options = {"num_predict": 4, "repeat_penalty": 1.1, "repeat_last_n": 8}
    raw = client.generate("tiny", "<tell>", raw=True, options=options)
    assert (raw.response, raw.done_reason, raw.eval_count) == ("Done", "length", 4)
    assert client.generate("tiny", "").done_reason == "load"
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"


def test_models_are_listed(client: Any, served: Served) -> None:
    assert [one.model for one in client.list().models] == ["tiny"]
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["llama.context_length"] == served.engine.target.context_length
    assert [one.model for one in client.ps().models] == ["tiny"]
    assert served.send("/api/version")[1]["version"]


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "field": ("colour is not supported", {"colour": "red"}),
    "option": ("options.colour is not supported", {"options": {"colour": "red"}}),
    "length": ("options.num_predict must be", {"options": {"num_predict": "long"}}),
    "penalty": ("options.repeat_penalty must be", {"options": {"repeat_penalty": 11}}),
    "top": ("top_logprobs needs logprobs", {"top_logprobs": 3}),
    "image": (
        "messages[0].images must be",
        {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]},
    ),
    "format": ("format must be", {"format": "yaml"}),
    "schema": ("format: grammar cannot be used", {"format": {"type": "nothing"}}),
    "time": ("keep_alive must be", {"keep_alive": "soon"}),
    "thinking": ("think must be", {"think": "hard"}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_have_its_shape(served: Served, name: str) -> None:
    message, fields = BAD[name]
    status, reply = served.send("/api/chat", {"model": "tiny", "messages": MESSAGES, **fields})
    assert (status, list(reply)) == (400, ["error"])
    assert message in reply["error"]

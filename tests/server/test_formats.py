"""Formats of answers: JSON that fits a schema, and errors for what is no schema."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_redrafter import Engine, Grammar
from mlx_redrafter.engine.prompt_encoding import encode_chat
from tests.helpers.models import fast_tokenizer, random_drafter, tiny_llama
from tests.server.serving import Served, make_engine, serving

openai: Any = pytest.importorskip("openai", reason="the client that tests use")
pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")

MESSAGES: list[Any] = [{"role": "user", "content": "WHO"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model, drafter = tiny_llama(vocab_size=264, spread=2.0), random_drafter(264, 32)
    with serving(Engine(model, fast_tokenizer(), drafter)) as one:
        yield one


def _ask(served: Served, **options: Any) -> Any:
    with served.openai() as client:
        asked = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=100, temperature=1.0, seed=3, **options
        )
        return list(asked) if options.get("stream") else asked


def _format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def test_answers_fit_the_schema(served: Served) -> None:
    whole = _ask(served, response_format=_format(SCHEMA, strict=True)).choices[0]
    assert json.loads(whole.message.content).keys() == {"name", "ok"}
    assert whole.finish_reason == "stop"
    chunks = _ask(served, response_format=_format(SCHEMA), stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.message.content
    engine = served.engine
    prompt = encode_chat(engine.tokenizer, MESSAGES)
    text = engine.generate(
        prompt, grammar=Grammar.json_schema(SCHEMA), max_tokens=100, temp=1.0, seed=3
    )
    assert text == whole.message.content


def test_an_object_may_be_cut(served: Served) -> None:
    choice = _ask(served, response_format={"type": "json_object"}).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": _format({"type": "nothing"})}, "Invalid type: nothing"),
        ({"response_format": _format({"minimum": 5, "maximum": 1, "type": "number"})}, "schema"),
        ({"response_format": _format({"enum": ["a" * 2**17]})}, "at most 131072 characters"),
    ],
    ids=["unknown type", "impossible", "huge"],
)
def test_bad_formats(served: Served, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(served, **fields)
    assert caught.value.param.startswith("response_format")
    assert message in caught.value.body["message"]


def test_a_tokenizer_without_a_vocabulary() -> None:
    with serving(make_engine()) as other:
        body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
        status, answer = other.send("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "fast tokenizer" in answer["error"]["message"]

"""Reasoning, calls of tools, formats, metrics and the page."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import openai
import pytest

from mlx_redrafter import Engine, Grammar, generate
from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.server.answer_grammar import first_state
from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.parts import Answer, TokenLogprob
from mlx_redrafter.server.protocols.openai_chat import read as read_chat
from mlx_redrafter.server.protocols.openai_completions import _format_logprobs
from tests.helpers.models import ByteTokenizer, fast_tokenizer, random_drafter, tiny_llama
from tests.helpers.tools import tool_tokenizer
from tests.property.test_grammars import SCHEMA, fits
from tests.server.serving import DEFAULTS, Served, make_engine, serving

MESSAGES: list[Any] = [{"role": "user", "content": "WHERE ARE YOU"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def _parse(text: str, tools: Any) -> dict[str, Any]:
    if not tools or "?" in text:
        raise KeyError(text)
    return {"name": tools[0]["function"]["name"], "arguments": {"text": text}}


def test_reasoning_and_calls():
    """The model is random, so its markers are what it writes anyway."""
    engine = make_engine()
    prompt = encode_chat(engine.tokenizer, MESSAGES, {"tools": TOOLS})
    text = generate(engine.target.model, engine.tokenizer, prompt, drafter=None, max_tokens=30)
    marks = [text[i : i + 3] for i in (4, 10, 16, 22)]
    assert [text.index(mark) for mark in marks] == [4, 10, 16, 22]
    engine = make_engine(tool_call_start=marks[2], tool_call_end=marks[3], tool_parser=_parse)
    engine.tokenizer._think_start, engine.tokenizer._think_end = marks[:2]
    engine.tokenizer._think_start_tokens = engine.tokenizer._think_end_tokens = (63, 63)
    with serving(engine) as served, served.openai() as client:
        options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        whole = client.chat.completions.create(**options).choices[0]
        chunks = [one.choices[0] for one in client.chat.completions.create(**options, stream=True)]
        assert whole.finish_reason == chunks[-1].finish_reason == "length"
        for messages in [whole.message], [one.delta for one in chunks]:
            content = "".join(one.content or "" for one in messages)
            reasoning = "".join(getattr(one, "reasoning", "") for one in messages)
            (call,) = (call for one in messages for call in one.tool_calls or ())
            assert reasoning == text[7:10]
            assert content == text[:4] + text[13:16] + text[25:]
            assert call.function.name == "look"
            assert json.loads(call.function.arguments or "") == {"text": text[19:22]}
        without = client.chat.completions.create(**options, tool_choice="none")
        assert without.choices[0].message.tool_calls is None


def test_arguments_that_json_lacks():
    for value in "1e999", "NaN", "[" * 100_000:
        assert ToolCall("1", "look", f'{{"a": {value}}}').parsed is None

    assert _answer({"name": "look", "arguments": {"a": float("nan")}})._parse_calls("") == []


@pytest.mark.parametrize("chosen", ["functions.look:0", 7])
def test_two_calls_with_one_id_stay_two(chosen):
    """A model numbers its calls as it likes, and pieces with one id become one call."""
    call = {"name": "look", "id": chosen, "arguments": {}}
    answer = _answer(call)
    first, second = answer._parse_calls("") + answer._parse_calls("")
    assert first.id == str(chosen) != second.id


def test_a_token_that_is_shown_often_is_decoded_once(monkeypatch):
    """Other texts wait while a prompt is repeated."""
    answer, decode = _answer({}), ByteTokenizer.decode
    decoding = create_autospec(decode, side_effect=decode)
    monkeypatch.setattr(ByteTokenizer, "decode", decoding)
    answer._request = replace(answer._request, top_logprobs=2)
    part = answer.repeat("", 7, [((8, -1.0), [(7, -1.0), (8, -2.0)])] * 1000)
    assert len(part.logprobs) == 1001
    assert {one.text for one in part.logprobs[1].top} == {one.text for one in part.logprobs[:2]}
    assert decoding.call_count < 20


def test_of_equal_texts_the_most_probable_token_is_shown():
    """Pieces of characters have the text of the replacement character, all of them."""
    top = tuple(TokenLogprob(*one) for one in (("\ufffd", -1.0), ("a", -2.0), ("\ufffd", -3.0)))
    shown = _format_logprobs([TokenLogprob("a", -2.0, top)], 0)
    assert shown["top_logprobs"] == [{"\ufffd": -1.0, "a": -2.0}]


def _answer(call: dict[str, Any]) -> Answer:
    """An answer whose calls are all this one."""
    tokenizer: Any = make_engine(tool_parser=lambda text, tools: call).tokenizer
    request, _ = read_chat({"messages": MESSAGES, "tools": TOOLS}, DEFAULTS)
    return Answer(request, tokenizer, [1], 0)


def test_metrics_health_and_page(served):
    for _ in range(2):
        served.text(prompt="ABC", max_tokens=9, temperature=1, seed=3)
    status, text = served.send("/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    assert lines['redrafter_requests_total{path="/v1/completions",status="200"}'] == "2"
    assert lines['redrafter_texts_total{end="length"}'] == "2"
    assert lines["redrafter_generated_tokens_total"] == "18"
    assert lines["redrafter_prompt_tokens_total"] == "6"
    assert lines["redrafter_cached_tokens_total"] == "2"
    assert 0 < int(lines["redrafter_steps_total"]) <= 16
    assert float(lines["redrafter_busy_seconds_total"]) > 0
    assert lines["redrafter_waiting_requests"] == "0"
    assert served.send("/health", key=None) == (200, {"status": "ok"})
    status, page = served.send("/", key=None)
    assert status == 200
    assert "<title>" in page
    assert '="http' not in page  # nothing comes from elsewhere


# Formats: JSON that fits a schema, and errors for what is no schema


@pytest.fixture(scope="module")
def schooled() -> Iterator[Served]:
    """With a fast tokenizer, which grammars need."""
    model, drafter = tiny_llama(vocab_size=264, spread=2.0), random_drafter(264, 32)
    with serving(Engine(model, fast_tokenizer(), drafter)) as one:
        yield one


def _ask(schooled: Served, **options: Any) -> Any:
    with schooled.openai() as client:
        asked = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=150, temperature=1.0, seed=3, **options
        )
        return list(asked) if options.get("stream") else asked


def _format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def test_answers_fit_the_schema(schooled):
    whole = _ask(schooled, response_format=_format(SCHEMA, strict=True)).choices[0]
    assert fits(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    chunks = _ask(schooled, response_format=_format(SCHEMA), stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.message.content
    engine = schooled.engine
    prompt = encode_chat(engine.tokenizer, MESSAGES)
    text = engine.generate(
        prompt, grammar=Grammar.json_schema(SCHEMA), max_tokens=150, temp=1.0, seed=3
    )
    assert text == whole.message.content


def test_json_follows_the_thinking():
    tokenizer = tool_tokenizer(thinks=True)
    ends = dict.fromkeys(tokenizer.encode("</think>"), 99)
    body = {"messages": MESSAGES, "logit_bias": ends, "response_format": _format(SCHEMA)}
    with serving(Engine(tiny_llama(vocab_size=288, spread=2.0), tokenizer, None)) as served:
        status, answer = served.send("/v1/chat/completions", {**body, "max_tokens": 150})
    assert status == 200
    assert fits(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)


def test_only_the_end_of_a_prompt_begins_the_thinking():
    """A message, such as a file that an agent reads, may have the mark, too."""
    tokenizer = tool_tokenizer(thinks=True)
    ends = "<think>\n", "<think>", "<think>?[A]", "<think></think>"
    states = [first_state(tokenizer, tokenizer.encode(f"[U]A[A]{end}")) for end in ends]
    assert states == ["reasoning", "reasoning", "normal", "normal"]


def test_an_object_may_be_cut(schooled):
    choice = _ask(schooled, response_format={"type": "json_object"}).choices[0]
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
def test_bad_formats(schooled, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(schooled, **fields)
    assert caught.value.param.startswith("response_format")
    assert message in caught.value.body["message"]


def test_a_tokenizer_without_a_vocabulary(served):
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    status, answer = served.send("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "fast tokenizer" in answer["error"]["message"]

"""Calls in every format: held as its template writes them, read in pieces, and as mlx-lm reads."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import iadd
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_redrafter import Engine, Grammar
from mlx_redrafter.server.answer_grammar import make_grammar
from mlx_redrafter.server.call_formats import find_format
from mlx_redrafter.server.parts import Answer, Part
from mlx_redrafter.server.protocols.openai_chat import read
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.tools import MAX_TOOLS, Tools
from tests.helpers.models import tiny_llama
from tests.helpers.tools import MARKS, spell, tool_tokenizer
from tests.server.serving import DEFAULTS

VOCAB_SIZE = 288
MODEL = tiny_llama(vocab_size=VOCAB_SIZE, context=1024)
PROMPT = [72, 101, 80]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Words."},
        "kind": {"enum": ["a b", "c"]},
        "more": {"$ref": "#/$defs/more"},
        "last": {"type": ["integer", "null"], "maximum": 9},
    },
    "required": ["text", "more"],
    "additionalProperties": False,
    "$defs": {
        "more": {
            "type": "object",
            "properties": {
                "x": {"type": "array", "items": {"type": "string"}},
                "next": {"anyOf": [{"$ref": "#/$defs/more"}, {"type": "null"}]},
                "on": {"type": "boolean"},
            },
        }
    },
}
# Calls after the marker, as chat templates write them. STRING is a text, JSON the same in quotes.
TEXTS = {
    "function_gemma": "call:say{text:<escape>STRING<escape>,kind:<escape>a b<escape>,"
    "more:{x:[<escape>STRING<escape>],next:{on:true}}}",
    "gemma4": 'call:say{text:<|"|>STRING<|"|>,kind:<|"|>a b<|"|>,'
    'more:{x:[<|"|>STRING<|"|>],next:{on:true}}}',
    "json_tools": '\n{"name": "say", "arguments": {"text": JSON, "kind": "a b", "more": MORE}}\n',
    "kimi_k2": '<|tool_call_begin|>functions.say:7<|tool_call_argument_begin|>{"text": JSON, '
    '"kind": "a b", "more": MORE}<|tool_call_end|>',
    "kimi_k3": '<|open|>call tool="say" index="1"<|sep|>'
    '<|open|>argument key="text" type="string"<|sep|>STRING<|close|>argument<|sep|>'
    '<|open|>argument key="kind" type="string"<|sep|>a b<|close|>argument<|sep|>'
    '<|open|>argument key="more" type="object"<|sep|>MORE<|close|>argument<|sep|>'
    "<|close|>call<|sep|>",
    "minicpm5": '"say"><param name="text"><![CDATA[STRING]]></param><param name="kind">a b</param>'
    '<param name="more">MORE</param>',
    "mistral": 'say[ARGS]{"text": JSON, "kind": "a b", "more": MORE}',
    "minimax_m2": '\n<invoke name="say">\n<parameter name="text">STRING</parameter>\n'
    '<parameter name="kind">a b</parameter>\n<parameter name="more">MORE</parameter>\n</invoke>\n',
    "pythonic": '[say(text=JSON, kind="a b", more=MORE)]',
    "qwen3_coder": "\n<function=say>\n<parameter=text>\nSTRING\n</parameter>\n"
    "<parameter=kind>\na b\n</parameter>\n<parameter=more>\nMORE\n</parameter>\n</function>\n",
} | {
    kind: f"{first}say\n"
    f"<{tag}arg_key>text</{tag}arg_key>\n<{tag}arg_value>STRING</{tag}arg_value>\n"
    f"<{tag}arg_key>kind</{tag}arg_key>\n<{tag}arg_value>a b</{tag}arg_value>\n"
    f"<{tag}arg_key>more</{tag}arg_key>\n<{tag}arg_value>MORE</{tag}arg_value>\n"
    for kind, tag, first in (("glm47", "", ""), ("longcat", "longcat_", "\n"))
}
PLAIN = "two words"
# Has the last marker and most tags of every format, but the one that ends its strings.
ODD = (
    ' \n"q" & \\ é </function></invoke></tool_call><tool_call|></longcat_tool_call>null)]}}, '
    "<|tool_call_end|><end_function_call><|close|>tools<|sep|><|open|>call</minimax:tool_call>\n "
)


def _say(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request: one with these parameters."""
    return [{"type": "function", "function": {"name": "say", "parameters": schema}}]


def _body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "A"}], "tools": _say(SCHEMA), **more}


def _tokens(engine: Engine, said: str, text: str) -> list[int]:
    """A call as tokens: strings letter by letter, as they have no special tokens."""
    quoted = json.dumps(said, ensure_ascii=False)
    more = f'{{"x": [{quoted}], "next": {{"on": true}}}}'
    values, tokens = {"STRING": said, "JSON": quoted, "MORE": more}, []
    for piece in re.split("(STRING|JSON|MORE)", text):
        if piece in values:
            tokens += spell(engine.tokenizer, values[piece])
        else:
            tokens += engine.tokenizer.encode(piece)
    return tokens


def _marked(engine: Engine, calls: list[int]) -> list[int]:
    """Calls between their markers."""
    tokenizer = engine.tokenizer
    return [*tokenizer.tool_call_start_tokens, *calls, *tokenizer.tool_call_end_tokens]


def _read(engine: Engine, tokens: list[int], reason: str, **fields: Any) -> list[Part]:
    """The parts of an answer of some tokens, which the grammar must allow."""
    request, _ = read(_body(**fields), DEFAULTS)
    grammar = make_grammar(engine, PROMPT, request.tools, None)
    if isinstance(grammar, Grammar):
        matcher = grammar.matcher(engine.tokenizer, VOCAB_SIZE)
        assert matcher.try_consume_tokens(tokens) == len(tokens), fields
        assert matcher.is_accepting() or reason == "length"
    answer = Answer(replace(request, grammar=grammar), engine.tokenizer, PROMPT, 0)
    detokenizer = engine.tokenizer.detokenizer
    parts = []
    for i, token in enumerate(tokens):
        is_last = i == len(tokens) - 1
        detokenizer.add_token(token)
        if is_last:
            detokenizer.finalize()
        counts = {"generation_tokens": i + 1, "steps": i, "from_draft": False}
        stats, end = SimpleNamespace(num_verified=i), reason if is_last else None
        shown = {"text": detokenizer.last_segment, "stats": stats, "finish_reason": end}
        parts.append(answer.add(SimpleNamespace(**counts, **shown)))
    return parts


def _join(parts: list[Part]) -> Part:
    return reduce(iadd, parts[1:], deepcopy(parts[0]))


@pytest.mark.parametrize("kind", TEXTS)
def test_a_call_with_all_tags_in_its_strings(kind):
    assert TEXTS.keys() == MARKS.keys()
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    tokenizer = engine.tokenizer
    for said in (PLAIN, ODD):
        call = _tokens(engine, said, TEXTS[kind])
        parts = _read(engine, _marked(engine, call), "stop", tool_choice="required")
        expected = {"text": said, "kind": "a b", "more": {"x": [said], "next": {"on": True}}}
        whole = _join(parts)
        (found,) = whole.tool_calls
        assert (found.name, found.parsed) == ("say", expected)
        assert (whole.content, whole.finish_reason) == ("", "tool_calls")
        assert found.id == "functions.say:7" if kind == "kimi_k2" else found.id
        assert sum(len(part.tool_calls) for part in parts) > len(said)  # letter by letter
        if said == PLAIN and kind != "function_gemma":  # mlx-lm's parser has no objects there
            types = {"text": "string", "kind": "string", "more": "object"}
            properties = {key: {"type": one} for key, one in types.items()}
            tools = [{"function": {"name": "say", "parameters": {"properties": properties}}}]
            parsed = tokenizer.tool_parser(tokenizer.decode(call), tools)
            parsed = parsed[0] if isinstance(parsed, list) else parsed
            assert (parsed["name"], parsed["arguments"]) == ("say", expected)


@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k3", "mistral", "pythonic"])
def test_several_calls_between_two_markers(kind):
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    form = find_format(engine.tokenizer)
    call = _tokens(engine, PLAIN, TEXTS[kind].strip("[]"))
    first, last = (spell(engine.tokenizer, text) for text in form.around)
    calls = [*first, *call, *engine.tokenizer.encode(form.again), *call, *last]
    whole = _join(_read(engine, _marked(engine, calls), "stop", tool_choice="required"))
    assert len({call.id for call in whole.tool_calls}) == 2
    assert [(call.parsed or {})["text"] for call in whole.tool_calls] == [PLAIN, PLAIN]


def test_several_calls_instead_of_a_format():
    engine = Engine(MODEL, tool_tokenizer(), None)
    call = _marked(engine, _tokens(engine, PLAIN, TEXTS["json_tools"]))
    calls = [*call, *spell(engine.tokenizer, "\n"), *call]
    whole = _join(_read(engine, calls, "stop", response_format={"type": "json_object"}))
    assert (len(whole.tool_calls), whole.content) == (2, "")


@pytest.mark.parametrize("kind", ["qwen3_coder", "gemma4", "json_tools"])
def test_a_call_that_is_cut(kind):
    """Its pieces have been sent already, so the whole answer has them, too."""
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    call, start = _tokens(engine, PLAIN, TEXTS[kind]), engine.tokenizer.tool_call_start_tokens
    for size in (2, len(call) // 2):
        parts = _read(engine, [*start, *call[:size]], "length")
        pieces = [piece for part in parts for piece in part.tool_calls]
        assert parts[-1].finish_reason == "length"
        assert (len(pieces) > 0) == (size > 2)
        assert all(piece.parsed is None for piece in pieces)
        if not pieces:
            content = "".join(part.content for part in parts)
            assert content.startswith(str(engine.tokenizer.tool_call_start))


BAD_PROPERTIES: list[Any] = [
    {"type": "string", "maxLength": "x"}, {"type": "string", "minLength": 4, "maxLength": 2},
    {"$ref": "#/nope"}, {"$ref": "#/properties/a"}, {"enum": 5}, {"enum": []}, {"anyOf": []},
    {"type": "array", "minItems": 3, "maxItems": 2}, False,
    {"type": "array", "items": [{"type": "string"}]},
]  # fmt: skip
BAD_SCHEMAS: list[dict[str, Any]] = [
    *({"properties": {"a": one}, "required": ["a"]} for one in BAD_PROPERTIES),
    {"properties": [1]}, {"properties": {"a b:": {"type": "string"}}}, {"required": ["b"]},
    {"$ref": "#"}, {"$ref": "https://elsewhere.example/schema"},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["glm47", "gemma4", "json_tools", "pythonic"])
def test_bad_schemas(kind):
    """Each is refused, or llguidance makes sense of it; none is an error of the server."""
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    refused = []
    for schema in BAD_SCHEMAS:
        try:
            make_grammar(engine, PROMPT, Tools(_say(schema)), None)
        except Refusal as error:
            refused.append(error.param)
    assert refused == ["tools"] * len(refused)
    assert len(refused) >= 6


@pytest.mark.parametrize("kind", ["gemma4", "json_tools"])
def test_as_many_tools_as_a_request_may_have(kind):
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    text = {"type": "string", "maxLength": 1 << 19}
    functions = [
        {"name": f"tool_{i}", "parameters": {"properties": {f"{i}_{j}": text for j in range(20)}}}
        for i in range(MAX_TOOLS)
    ]
    tools = Tools([{"type": "function", "function": one} for one in functions])
    assert make_grammar(engine, PROMPT, tools, None) is not None


@pytest.mark.parametrize("kind", ["gemma4", "kimi_k3", "minicpm5", "qwen3_coder"])
def test_thousands_of_choices(kind):
    """Each is one that a model can choose, to the letter."""
    engine = Engine(MODEL, tool_tokenizer(kind), None)
    choices = ["", "a", "a b", 'é"\\/\t', *(f"choice number {i}" for i in range(500))]
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "text": {"enum": choices}}}
    text = TEXTS[kind].replace("<![CDATA[STRING]]>", "STRING")
    for said in (*choices[:4], choices[-1]):
        tokens = _marked(engine, _tokens(engine, said, text))
        parts = _read(engine, tokens, "stop", tools=_say(schema), tool_choice="required")
        (call,) = _join(parts).tool_calls
        assert (call.parsed or {})["text"] == said


def test_two_tools_with_one_name():
    tool = {"type": "function", "function": {"name": "say"}}
    with pytest.raises(Refusal, match="names of their own"):
        read(_body(tools=[tool, tool]), DEFAULTS)

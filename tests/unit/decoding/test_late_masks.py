"""Grammars after a marker: the marker may be spelled in any way, and free text stays free."""

import json
from itertools import chain, repeat
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import AddedToken

from mlx_redrafter import Engine
from mlx_redrafter.server.answer_grammar import make_grammar
from mlx_redrafter.server.parts import Answer
from mlx_redrafter.server.protocols.openai_chat import read
from tests.helpers.models import tiny_llama
from tests.helpers.tools import tool_tokenizer
from tests.server.serving import DEFAULTS

pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")

VOCAB_SIZE = 288
MODEL = tiny_llama(vocab_size=VOCAB_SIZE, spread=2.0)
PROMPT = [72, 101, 80]
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
BODY = {
    "messages": [{"role": "user", "content": "A"}],
    "tools": [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}],
}


def _engine(kind: str) -> Engine:
    tokenizer = tool_tokenizer(kind)
    # Two tokens that end beyond the marker; only the first one begins a call.
    added = [AddedToken(text, special=False) for text in ('l>{"name', "l>no")]
    tokenizer._tokenizer.add_tokens(added)
    return Engine(MODEL, tokenizer, None)


def _held() -> tuple[Engine, Any]:
    """An engine, and the grammar of an answer that may call a tool."""
    engine = _engine("json_tools")
    request, _ = read(BODY, DEFAULTS)
    return engine, make_grammar(engine, PROMPT, request.tools, None)


def _characters(engine: Engine, text: str) -> list[int]:
    return [
        token
        for character in text
        for token in engine.tokenizer.encode(character, add_special_tokens=False)
    ]


def _write(engine: Engine, tokens: list[int], **fields: Any) -> Any:
    """The parts of an answer whose tokens are chosen by a script, added up."""
    request, _ = read({**BODY, **fields}, DEFAULTS)
    grammar = make_grammar(engine, PROMPT, request.tools, None)
    request = request.__class__(**{**vars(request), "grammar": grammar})
    answer, whole = Answer(request, engine.tokenizer, PROMPT, 0), None
    script = chain(tokens, repeat(0))  # the step after the end has begun already

    def choose(log_probs: mx.array) -> mx.array:
        token = next(script)
        assert np.isfinite(log_probs[0, token].item()) or token == 0, token
        return mx.array([token])

    for response in engine.stream(PROMPT, grammar=grammar, sampler=choose, max_tokens=200):
        part = answer.add(response)
        whole = part if whole is None else whole + part
    return whole


def test_a_marker_in_pieces_and_an_end_within_a_string() -> None:
    engine = _engine("json_tools")

    def ids(text: str) -> list[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    said = "a </tool_call> b"
    string = [*ids('": "say", "arguments": {"text": "'), *_characters(engine, said), *ids('"}}')]
    for start in (ids('l>{"name'), [*_characters(engine, "l>"), *ids('{"name')]):
        tokens = [*_characters(engine, "Well <tool_cal"), *start, *string, *ids("</tool_call>")]
        answer = _write(engine, tokens)
        (call,) = answer.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("say", {"text": said})
        assert (answer.content, answer.finish_reason) == ("Well", "tool_calls")


def test_only_tokens_that_begin_a_call_may_end_beyond_the_marker() -> None:
    engine, grammar = _held()
    good, bad = (
        engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in ('l>{"name', "l>no")
    )
    masks = engine.masks(grammar)
    logits = mx.zeros((1, VOCAB_SIZE))
    assert mx.isfinite(masks.apply(logits, [-1], [0])).all()
    masks.extend(_characters(engine, "<tool_cal"))
    allowed = mx.isfinite(masks.apply(logits, [0], [0]))[0].tolist()
    assert allowed[good]
    assert [token for token in range(VOCAB_SIZE) if not allowed[token]] == [bad]


def test_free_text_is_the_text_without_tools() -> None:
    engine, grammar = _held()
    marker = engine.tokenizer.tool_call_start_tokens[0]
    never = mx.zeros((VOCAB_SIZE,)).at[marker].add(-1e9)
    options: dict[str, Any] = {
        "logits_processors": [lambda _, logits: logits + never],
        "max_tokens": 60,
        "temp": 1.0,
        "seed": 5,
    }
    held = [one.token for one in engine.stream(PROMPT, grammar=grammar, **options)]
    assert held == [one.token for one in engine.stream(PROMPT, **options)]


def test_a_call_may_be_required_only_in_formats_with_a_grammar() -> None:
    tokenizer = tool_tokenizer("json_tools")
    tokenizer._tool_parser = lambda text, tools: None
    engine = Engine(MODEL, tokenizer, None)
    assert make_grammar(engine, PROMPT, read(BODY, DEFAULTS)[0].tools, None) is None
    request, _ = read({**BODY, "tool_choice": "required"}, DEFAULTS)
    with pytest.raises(Exception, match="tool_choice needs tool calls that can be held"):
        make_grammar(engine, PROMPT, request.tools, None)

"""Every call of a tool fits its schema, whatever the model is, and drafts change no token.

The marker before a call may be spelled in any way, and free text stays free.
"""

import json
import random
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AddedToken

from mlx_redrafter import Engine, Grammar
from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.server.answer_grammar import AnswerFormat, make_grammar
from mlx_redrafter.server.call_formats import find_format
from mlx_redrafter.server.call_grammar import CallGrammar
from mlx_redrafter.server.call_reader import CallReader, ToolCall, add_call
from mlx_redrafter.server.parts import Answer, Part
from mlx_redrafter.server.protocols.openai_chat import read
from mlx_redrafter.server.requests import ChatRequest
from mlx_redrafter.server.tools import Tools
from tests.helpers.drafts import Scripted
from tests.helpers.models import random_drafter, tiny_llama
from tests.helpers.tools import MARKS, spell, tool_tokenizer
from tests.property.test_grammars import TREE, fits, random_schema
from tests.server.serving import DEFAULTS

pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")

VOCAB_SIZE = 288
# Random schemas of each format.
NUM_SCHEMAS = 30
MODEL = tiny_llama(vocab_size=VOCAB_SIZE, spread=2.0, context=1024)
TOKENIZERS = {(kind, thinks): tool_tokenizer(kind, thinks) for kind in MARKS for thinks in (0, 1)}
MESSAGES = [{"role": "user", "content": "GO"}]


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    """One to three tools with bounded arguments."""
    tools = []
    for name in rng.sample(["look", "get_weather", "mcp-run"], rng.randint(1, 3)):
        names = rng.sample(["city", "count", "on", "x-y"], rng.randint(0, 3))
        schema = {
            "type": "object",
            "properties": {key: random_schema(rng) for key in names},
            "required": [key for key in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    return tools


def collect(
    engine: Engine, request: ChatRequest, prompt: list[int], grammar: Any, **options: Any
) -> Any:
    """The tokens of an answer and its parts, added up."""
    held = Answer(replace(request, grammar=grammar), engine.tokenizer, prompt, 0)
    tokens, whole = [], None
    for response in engine.stream(prompt, grammar=grammar, **options):
        tokens.append(response.token)
        part: Part = held.add(response)
        whole = deepcopy(part) if whole is None else whole + part
    return tokens, whole


def answer(kind: str, request: ChatRequest, seed: int, drafter: Any, **shape: Any) -> Any:
    """`collect` with a model that likes to call a tool."""
    tokenizer = TOKENIZERS[kind, seed % 2 == 1]
    engine = Engine(MODEL, tokenizer, drafter)
    prompt = encode_chat(tokenizer, request.messages, {"tools": request.tools.definitions})
    grammar = make_grammar(engine, prompt, request.tools, request.format)
    assert grammar is not None
    marker = list(tokenizer.tool_call_start_tokens)

    def call(tokens: mx.array, logits: mx.array) -> mx.array:
        last = tokens.tolist()[-len(marker) :]
        begun = next(
            n for n in range(len(marker) - 1, -1, -1) if last[len(last) - n :] == marker[:n]
        )
        return logits.at[..., marker[begun]].add(4.0)

    options = {"logits_processors": [call], "max_tokens": 90, "temp": 1.0, "seed": seed, **shape}
    return collect(engine, request, prompt, grammar, **options)


def check(kind: str, seed: int, choice: Any) -> int:
    """Check the calls of one answer; return how many there are."""
    rng = random.Random(seed)
    body = {"messages": MESSAGES, "tools": random_tools(rng), "tool_choice": choice}
    if rng.random() < 0.5:
        body["parallel_tool_calls"] = False
    request, _ = read(body, DEFAULTS)
    tokens, whole = answer(kind, request, seed, None)
    schemas = {tool["name"]: tool["parameters"] for tool in request.tools.callable}
    for call in whole.tool_calls:
        if call.parsed is None:
            assert (call, whole.finish_reason) == (whole.tool_calls[-1], "length")
        else:
            assert fits(call.parsed, schemas[call.name]), (call, schemas)
    if whole.finish_reason == "tool_calls":
        assert tokens[-1] == 0
        if body.get("parallel_tool_calls") is False:
            assert len(whole.tool_calls) == 1
    elif choice == "required":
        assert whole.finish_reason == "length"
    drafter = random_drafter(VOCAB_SIZE, 32) if seed % 3 else Scripted(tokens, VOCAB_SIZE)
    assert answer(kind, request, seed, drafter, **TREE)[0] == tokens
    return len(whole.tool_calls)


def test_drafts_change_no_call():
    choices = ("auto", "required")
    assert sum(check(kind, seed, choices[seed % 2]) for seed, kind in enumerate(MARKS)) > 4


def wander(grammar: Grammar, tokenizer: TokenizerWrapper, rng: random.Random) -> list[int]:
    """Random tokens that a grammar allows, up to its end."""
    matcher, written = grammar.matcher(tokenizer, VOCAB_SIZE), list[int]()
    while not (matcher.is_accepting() and rng.random() < 0.5) and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice([one for one in np.flatnonzero(bits[:VOCAB_SIZE]).tolist() if one])
        assert matcher.consume_token(token)
        written.append(token)
    return written


@pytest.mark.parametrize("kind", MARKS)
def test_random_calls_fit_their_schemas(kind):
    """mlx-lm's parser reads the same, but for names, strings and objects that it cannot read."""
    tokenizer, num_parsed = TOKENIZERS[kind, 0], 0
    form = find_format(tokenizer)
    assert form is not None
    for seed in range(NUM_SCHEMAS):
        rng = random.Random(seed)
        tools = replace(Tools(random_tools(rng)), is_required=True, is_parallel=False)
        grammar = CallGrammar(tokenizer, VOCAB_SIZE, form, tools).whole(None)
        text = tokenizer.decode(wander(grammar, tokenizer, rng))
        inner = text.removeprefix(str(tokenizer.tool_call_start))
        reader, calls = CallReader(form, tools), list[ToolCall]()
        for character in inner.removesuffix(str(tokenizer.tool_call_end)):
            piece = reader.add(character)
            if piece is not None:
                add_call(calls, piece)
        if (piece := reader.end()) is not None:
            add_call(calls, piece)
        (call,) = calls
        schemas = {tool["name"]: tool["parameters"] for tool in tools.callable}
        assert call.parsed is not None, text
        assert fits(call.parsed, schemas[call.name]), (text, schemas)
        num_parsed += parses_equally(tokenizer, inner, tools, call)
    assert num_parsed >= NUM_SCHEMAS // 3, num_parsed


def parses_equally(tokenizer: TokenizerWrapper, text: str, tools: Tools, call: ToolCall) -> bool:
    try:
        parsed = tokenizer.tool_parser(
            text.removesuffix(str(tokenizer.tool_call_end)), tools.definitions
        )
    except Exception:  # mlx-lm's parsers raise exceptions of any kind
        return False
    one = parsed[0] if isinstance(parsed, list) else parsed
    return (one["name"], one["arguments"]) == (call.name, call.parsed)


def test_a_tree_of_which_some_nodes_are_held():
    """Drafts that begin a call stand next to thinking, in which the text may not end."""
    check("kimi_k2", 1007, "required")


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_is_a_call_or_fits_its_format(seed):
    rng = random.Random(seed)
    asked = {"type": "object", "properties": {"it": random_schema(rng)}, "required": ["it"]}
    asked["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": asked}}
    body = {"messages": MESSAGES, "tools": random_tools(rng), "response_format": form}
    request, _ = read(body, DEFAULTS)
    for kind in ("json_tools", "qwen3_coder"):
        tokens, whole = answer(kind, request, 2 * seed, None)
        if whole.finish_reason == "stop":
            assert fits(json.loads(whole.content), asked)
        else:
            assert whole.finish_reason == "length" or whole.tool_calls
        script = Scripted(tokens, VOCAB_SIZE)
        assert answer(kind, request, 2 * seed, script, **TREE)[0] == tokens
    engine = Engine(MODEL, TOKENIZERS["json_tools", 1], None)
    thinking = engine.tokenizer.encode("<think>")
    grammar = make_grammar(engine, [5, *thinking], Tools([]), AnswerFormat(asked, "format"))
    close = mx.zeros((VOCAB_SIZE,)).at[thinking[0] + 1].add(6.0)
    options: dict[str, Any] = {"logits_processors": [lambda _, logits: logits + close]}
    options |= {"grammar": grammar, "temp": 1.0, "seed": seed}
    text = engine.generate([5, *thinking], **options)
    assert fits(json.loads(text.partition("</think>")[2]), asked)


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
REQUEST, _ = read(BODY, DEFAULTS)


def _engine() -> Engine:
    tokenizer = tool_tokenizer("json_tools")
    # Two tokens that end beyond the marker; only the first one begins a call.
    added = [AddedToken(text, special=False) for text in ('l>{"name', "l>no")]
    tokenizer._tokenizer.add_tokens(added)
    return Engine(MODEL, tokenizer, None)


def _held() -> tuple[Engine, Any]:
    """An engine, and the grammar of an answer that may call a tool."""
    engine = _engine()
    return engine, make_grammar(engine, PROMPT, REQUEST.tools, None)


def _write(engine: Engine, tokens: list[int]) -> Any:
    """The parts of an answer whose tokens are chosen by a script, added up."""
    grammar = make_grammar(engine, PROMPT, REQUEST.tools, None)
    script = chain(tokens, repeat(0))  # the step after the end has begun already

    def choose(log_probs: mx.array) -> mx.array:
        token = next(script)
        assert np.isfinite(log_probs[0, token].item()) or token == 0, token
        return mx.array([token])

    _, whole = collect(engine, REQUEST, PROMPT, grammar, sampler=choose, max_tokens=200)
    return whole


def test_a_marker_in_pieces_and_an_end_within_a_string():
    engine = _engine()
    ids, characters = engine.tokenizer.encode, partial(spell, engine.tokenizer)
    said = "a </tool_call> b"
    string = [*ids('": "say", "arguments": {"text": "'), *characters(said), *ids('"}}')]
    for start in (ids('l>{"name'), [*characters("l>"), *ids('{"name')]):
        tokens = [*characters("Well <tool_cal"), *start, *string, *ids("</tool_call>")]
        whole = _write(engine, tokens)
        (call,) = whole.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("say", {"text": said})
        assert (whole.content, whole.finish_reason) == ("Well", "tool_calls")


def test_only_tokens_that_begin_a_call_may_end_beyond_the_marker():
    engine, grammar = _held()
    good, bad = (engine.tokenizer.encode(text)[0] for text in ('l>{"name', "l>no"))
    masks = engine.masks(grammar)
    logits = mx.zeros((1, VOCAB_SIZE))
    assert mx.isfinite(masks.apply(logits, [-1], [0])).all()
    masks.extend(spell(engine.tokenizer, "<tool_cal"))
    allowed = mx.isfinite(masks.apply(logits, [0], [0]))[0].tolist()
    assert allowed[good]
    assert [token for token in range(VOCAB_SIZE) if not allowed[token]] == [bad]


def test_free_text_is_the_text_without_tools():
    engine, grammar = _held()
    marker = engine.tokenizer.tool_call_start_tokens[0]
    never = mx.zeros((VOCAB_SIZE,)).at[marker].add(-1e9)
    options: dict[str, Any] = {"logits_processors": [lambda _, logits: logits + never]}
    options |= {"max_tokens": 60, "temp": 1.0, "seed": 5}
    held = [one.token for one in engine.stream(PROMPT, grammar=grammar, **options)]
    assert held == [one.token for one in engine.stream(PROMPT, **options)]


def test_calls_are_held_only_in_formats_with_a_grammar():
    tokenizer = tool_tokenizer("json_tools")
    tokenizer._tool_parser = lambda text, tools: None
    engine = Engine(MODEL, tokenizer, None)
    assert make_grammar(engine, PROMPT, REQUEST.tools, None) is None
    other = {"type": "function", "function": {"name": "other"}}
    some = {"type": "allowed_tools", "mode": "auto", "tools": [other]}
    body = {**BODY, "tools": [*BODY["tools"], other]}
    for choice in "required", some:
        tools = read({**body, "tool_choice": choice}, DEFAULTS)[0].tools
        with pytest.raises(Exception, match="tool_choice needs tool calls that can be held"):
            make_grammar(engine, PROMPT, tools, None)
    assert not read({**body, "tool_choice": {**some, "tools": []}}, DEFAULTS)[0].tools.definitions

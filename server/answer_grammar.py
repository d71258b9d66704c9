"""The grammar of an answer: its format, the calls that it may make, or both."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.grammar import Grammar, LateGrammar, lark_json
from mlx_redrafter.server.call_formats import find_format
from mlx_redrafter.server.call_grammar import CallGrammar
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.tools import Tools

# Maximum number of tokens by which a chat template begins the reasoning.
MAX_BEGINNING = 16


class AnswerFormat(NamedTuple):
    """JSON schema of an answer, and the field of the request that gives it, for messages."""

    schema: dict[str, Any]
    param: str


def first_state(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> str:
    """Return the state of a text after a chat's prompt, whose end may have begun the reasoning."""
    if tokenizer.response_initial_state or not tokenizer.has_thinking:
        return tokenizer.response_initial_state or "normal"
    tail = list(prompt[-MAX_BEGINNING:])
    start = tokenizer.rfind_think_start(tail)
    after = tail[start + len(tokenizer.think_start_tokens) :]
    # The mark in a message, such as a question about it, begins nothing.
    is_open = start >= 0 and not tokenizer.decode(after).strip()
    return "reasoning" if is_open else "normal"


def make_grammar(
    engine: Engine, prompt: Sequence[int], tools: Tools | None, asked: AnswerFormat | None
) -> Grammar | LateGrammar | None:
    """Make the grammar of the answer to a prompt, of token ids.

    ``tools`` are those that the answer may call, None outside of chats; ``asked`` is the format of
    an answer that calls none. Return None if the answer is free: it has no format, and no calls
    that must be made or that can be held to their schemas. Raise `Refusal` if a schema is
    malformed, or the model has no grammar for what must hold.
    """
    param = "" if asked is None else asked.param
    grammar: Grammar | LateGrammar | None
    try:
        if tools is not None and tools.callable:
            param = "tools"
            grammar = _hold_calls(engine, prompt, tools, asked)
        elif asked is None:
            return None
        else:
            grammar = Grammar.json_schema(asked.schema)
            if tools is not None:
                grammar = _after_thinking(engine.tokenizer, prompt, grammar, {})
        if grammar is not None:
            engine.masks(grammar)
    except ConfigError as error:
        raise Refusal(f"{param}: {error}", param) from error
    return grammar


def _hold_calls(
    engine: Engine, prompt: Sequence[int], tools: Tools, asked: AnswerFormat | None
) -> Grammar | LateGrammar | None:
    tokenizer, form = engine.tokenizer, find_format(engine.tokenizer)
    demand = _demand(tools, asked)
    if form is None:
        if demand is None:
            return None
        raise Refusal(
            f"{demand} needs tool calls that can be held to a schema, and the format of this "
            "model's calls cannot; leave it out",
            demand,
        )
    try:
        calls = CallGrammar(tokenizer, engine.target.vocab_size, form, tools)
    except ConfigError as error:  # of the tokenizer, or llguidance is missing
        if demand is None:
            return None
        raise Refusal(f"{demand}: {error}", demand) from error
    start = str(tokenizer.tool_call_start)
    if asked is None and not tools.is_required:
        is_last = calls.is_last or not tools.is_parallel
        return LateGrammar({start: calls.after_marker(is_whole=not tools.is_parallel)}, is_last)
    other = None if asked is None or tools.is_required else lark_json(asked.schema)
    late = {start: calls.after_marker(is_whole=True)}
    return _after_thinking(tokenizer, prompt, calls.whole(other), late)


def _demand(tools: Tools, asked: AnswerFormat | None) -> str | None:
    """Return the field of a request that only a grammar can meet."""
    if tools.is_required or len(tools.callable) < len(tools.definitions):
        return "tool_choice"
    if not tools.is_parallel:
        return "parallel_tool_calls"
    return None if asked is None else asked.param


def _after_thinking(
    tokenizer: TokenizerWrapper, prompt: Sequence[int], grammar: Grammar, others: dict[str, Grammar]
) -> Grammar | LateGrammar:
    """Let a text that begins with thinking end it first."""
    if first_state(tokenizer, prompt) != "reasoning":
        return grammar
    grammars = {str(tokenizer.think_end): grammar, **others}
    return LateGrammar(grammars, is_last=True, may_end_before=False)

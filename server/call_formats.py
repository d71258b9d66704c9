"""Grammars of tool calls, in the formats that mlx-lm's parsers read.

A grammar writes each call in the spelling of the model's chat template, so that the parser reads it
back as it was meant. A string between two tags has no quotes, so it contains no tag of the format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.grammar import Grammar, lark_json, read_vocabulary
from mlx_redrafter.server.tools import Tools

# Words of a JSON schema that do not change what fits it, and take most of its length.
_NOTES = frozenset({"$schema", "$id", "$comment", "title", "description", "examples", "default"})
# Words of a JSON schema whose members have names of the author's choice.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# Words of a JSON schema that hold values, not schemas.
_VALUES = frozenset({"const", "enum", "required"})
# Names of tools that all formats can spell, as at OpenAI.
_TOOL_NAME = re.compile(r"[\w-]{1,128}")
# Names of arguments that can stand within a tag.
_KEY = re.compile(r"[^\s<>\"'=]{1,128}")


@dataclass(frozen=True)
class JsonCalls:
    """A format whose arguments are JSON.

    Attributes:
        before: Text before the name of the tool.
        between: Text between the name and the arguments.
        after: Text after the arguments.
        again: Text between the calls that stand between one pair of markers; None if one does.
    """

    before: str
    between: str
    after: str
    again: str | None = None


@dataclass(frozen=True)
class TaggedCalls:
    """A format whose arguments stand between tags; strings stand there without quotes.

    Attributes:
        head: Text with the name of the tool.
        before: Text before an argument, with its name.
        after: Text after an argument.
        tail: Text after the last argument.
        tags: Texts that a string must not contain.
        has_null: Whether the parser reads ``null`` as no string.
    """

    head: str
    before: str
    after: str
    tail: str
    tags: tuple[str, ...]
    has_null: bool


CallFormat = JsonCalls | TaggedCalls

_QWEN_TAGS = ("</parameter>", "</function>", "</tool_call>")
_MINIMAX_TAGS = ("</parameter>", "</invoke>", "</minimax:tool_call>")
_GLM_TAGS = ("</arg_value>", "<arg_key>", "</tool_call>")
_GLM = TaggedCalls(
    "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "", _GLM_TAGS, False
)
# Formats by the module of mlx-lm's parser.
_FORMATS: dict[str, CallFormat] = {
    "json_tools": JsonCalls('{"name": "', '", "arguments": ', "}"),
    "kimi_k2": JsonCalls(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        again="",
    ),
    "mistral": JsonCalls("", "[ARGS]", "", again="[TOOL_CALLS]"),
    "qwen3_coder": TaggedCalls(
        "<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>", _QWEN_TAGS, True
    ),
    "minimax_m2": TaggedCalls(
        '<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>",
        _MINIMAX_TAGS,
        True,
    ),
    "glm47": _GLM,
    "laguna": _GLM,
}


def find_format(tokenizer: TokenizerWrapper) -> CallFormat | None:
    """Return the format of a model's calls; None if there is no grammar for it."""
    name = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if tokenizer.response_transitions:  # states of its own decide where a call begins
        return None
    if name == "mistral" and "[ARGS]" not in tokenizer.get_vocab():  # the older list of calls
        return None
    return _FORMATS.get(name)


def for_parser(form: CallFormat | None, tools: Tools) -> list[dict[str, Any]]:
    """Return tools whose types make mlx-lm's parser read each argument as its grammar writes it.

    A parser of a tagged format reads strings as they are and objects as JSON.
    """
    if not isinstance(form, TaggedCalls):
        return tools.definitions
    found = []
    for function in tools.callable:
        properties = function.get("parameters", {}).get("properties", {})
        kinds = {
            key: {"type": "string" if _is_bare(schema) else "object"}
            for key, schema in properties.items()
        }
        parameters = {"type": "object", "properties": kinds}
        found.append({"function": {"name": function["name"], "parameters": parameters}})
    return found


class CallGrammar:
    """The grammar of the calls of some tools.

    Args:
        tokenizer: Tokenizer of the model.
        vocab_size: Number of tokens that the model chooses from.
        form: Format of the calls.
        tools: The tools.

    Attributes:
        tools: Tools of the calls.
        is_last: Whether nothing can follow a call, as no marker ends it.

    Raises:
        ConfigError: llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, vocab_size: int, form: CallFormat, tools: Tools
    ):
        self.tools = tools
        self.is_last = not tokenizer.tool_call_end
        self._tokenizer = tokenizer
        self._vocabulary = read_vocabulary(tokenizer, vocab_size)
        self._form = form
        self._begin, self._end = map(str, (tokenizer.tool_call_start, tokenizer.tool_call_end))

    def after_marker(self, is_whole: bool) -> Grammar:
        """Return the grammar of the text after the marker of a call.

        Args:
            is_whole: Whether the grammar covers the whole text, with the calls that follow.

        Raises:
            ConfigError: A schema is malformed.
        """
        rest = " (BLANK? block)*" if is_whole and self._has_blocks else ""
        return self._compile(f"start: body{rest}")

    def whole(self, other: str | None) -> Grammar:
        """Return the grammar of a text that consists of calls.

        Args:
            other: Term for another text that may stand there instead, in Lark's format.

        Raises:
            ConfigError: A schema is malformed.
        """
        calls = "block (BLANK? block)*" if self._has_blocks else "block"
        alternative = "" if other is None else f" | other\nother: {other}"
        return self._compile(f"start: {calls}{alternative}")

    @property
    def _has_blocks(self) -> bool:
        """Whether several calls are several blocks, each with its own markers."""
        again = self._form.again if isinstance(self._form, JsonCalls) else None
        return self.tools.is_parallel and again is None

    def _compile(self, start: str) -> Grammar:
        functions = self.tools.callable
        lines = [start, "BLANK: /[ \\n]{1,4}/", f"block: {self._spell(self._begin)} body"]
        end = self._spell(self._end) if self._end else ""
        again = self._form.again if isinstance(self._form, JsonCalls) else None
        repeated = ""
        if again is not None and self.tools.is_parallel:
            repeated = f" ({self._spell(again)} call)*"
        # Templates write a line break on either side of a call.
        after = f'"\\n"? {end}' if end else ""
        lines.append(f'body: "\\n"? call{repeated} {after}')
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        try:
            for i, function in enumerate(functions):
                lines += self._write(i, function)
            return Grammar.lark("\n".join(lines))
        except ConfigError:
            for function in functions:
                self._check(function)
            raise

    def _check(self, function: dict[str, Any]) -> None:
        """Raise `ConfigError` with the name of a tool if its schema alone cannot be used."""
        try:
            Grammar.lark("\n".join(["start: call_0", *self._write(0, function)]))
        except ConfigError as error:
            raise ConfigError(f"{function['name']}: {error}") from error

    def _write(self, i: int, function: dict[str, Any]) -> list[str]:
        name, lenient = function["name"], not function.get("strict")
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigError("the name of a tool must consist of letters, digits, _ and -")
        schema = _without_notes(function.get("parameters") or {"additionalProperties": False})
        schema = {"type": "object", **schema}
        if isinstance(self._form, JsonCalls):
            form = self._form
            head, tail = self._spell(form.before + name + form.between), self._spell(form.after)
            return [
                f"call_{i}: {head} arguments_{i} {tail}",
                f"arguments_{i}: {lark_json(schema, lenient)}",
            ]
        return self._write_tagged(i, self._form, name, schema, lenient)

    def _write_tagged(
        self, i: int, form: TaggedCalls, name: str, schema: dict[str, Any], lenient: bool
    ) -> list[str]:
        """Write the rules of a call between tags, with one rule for each argument."""
        lark_json(schema, lenient)  # checks it as a whole
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if unknown := set(required) - set(properties):
            raise ConfigError(f"required names {min(unknown)!r}, which is no property")
        definitions: dict[str, Any] = {
            key: schema[key] for key in ("$defs", "definitions") if key in schema
        }
        parts, rules = [self._spell(form.head.format(name))], []
        for j, (key, value) in enumerate(properties.items()):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"the name of an argument must fit in a tag, got {key!r}")
            rule = f"argument_{i}_{j}"
            parts.append(rule if key in required else f"{rule}?")
            before, after = self._spell(form.before.format(key)), self._spell(form.after)
            rules += _write_argument(f"{i}_{j}", value, definitions, before, after, form, lenient)
        if form.tail:
            parts.append(self._spell(form.tail))
        return [f"call_{i}: {' '.join(parts)}", *rules]

    def _spell(self, text: str) -> str:
        """Return terms for a text, in which a special token is named by its id."""
        terms, plain = [], ""
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            piece = self._vocabulary.decode_bytes([token]).decode()
            if not self._vocabulary.is_special_token(token):
                plain += piece
                continue
            terms += [json.dumps(plain)] if plain else []
            terms.append(f"<[{token}]>")
            plain = ""
        return " ".join([*terms, json.dumps(plain)] if plain else terms)


def _write_argument(
    name: str,
    schema: dict[str, Any],
    definitions: dict[str, Any],
    before: str,
    after: str,
    form: TaggedCalls,
    lenient: bool,
) -> list[str]:
    """Write the rules of one argument between tags."""
    if not _is_bare(schema):
        term = lark_json({**_with_bounds(schema), **definitions}, lenient)
        return [f"argument_{name}: {before} json_{name} {after}", f"json_{name}: {term}"]
    if "enum" in schema:
        listed = " | ".join(map(json.dumps, schema["enum"]))
        return [f"argument_{name}: {before} ({listed}) {after}"]
    return [
        f"argument_{name}: {before} text_{name}",
        f"RAW_{name}: {_bare_text(schema, form)}",
        f"END_{name}: RAW_{name} {json.dumps(form.after)}",
        f"text_{name}[lazy]: END_{name}",
    ]


def _bare_text(schema: dict[str, Any], form: TaggedCalls) -> str:
    """Return a term for a string without quotes."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    tags = "|".join(re.escape(tag).replace("/", r"\/") for tag in form.tags)
    # A parser may strip blanks from the text.
    terms = [
        f"/(?s:.{{{low},{high}}})/",
        f"~/(?s:.*)({tags})(?s:.*)/",
        r"~/\s(?s:.*)/",
        r"~/(?s:.*)\s/",
    ]
    return " & ".join([*terms, "~/(?i:null)/"] if form.has_null else terms)


def _is_bare(schema: object) -> bool:
    """Whether an argument is a string that stands between tags as it is."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return False
    words = schema.keys() - _NOTES
    if words == {"type", "enum"}:
        choices = schema["enum"]
        return all(isinstance(one, str) and re.fullmatch(r"[\w.-]+", one) for one in choices) and (
            "null" not in map(str.lower, choices)
        )
    return words <= {"type", "minLength", "maxLength"}


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Bound a number by the integers that a double holds, which a parser may go through."""
    bounds = {"minimum": -(2**53), "maximum": 2**53}
    return {**bounds, **schema} if schema.get("type") in ("integer", "number") else schema


def _without_notes(schema: Any) -> Any:
    """Leave out the words of a schema that say nothing about what fits it."""
    if isinstance(schema, list):
        return list(map(_without_notes, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: _without_notes(one) for key, one in value.items()}
        if name in _NAMED and isinstance(value, dict)
        else value
        if name in _VALUES
        else _without_notes(value)
        for name, value in schema.items()
        if name not in _NOTES
    }

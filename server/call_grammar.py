"""Grammars of tool calls: each call is written as the model's chat template writes it."""

import json
import re
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.grammar import NOTES, Grammar, lark_json, leave_out, read_vocabulary
from mlx_redrafter.server.call_formats import CallFormat
from mlx_redrafter.server.call_rules import CallRules, QuotedValues
from mlx_redrafter.server.tools import Tools

# Names of tools that all formats can spell, as at OpenAI.
_TOOL_NAME = re.compile(r"[\w-]{1,128}")
# A reference to something else than a definition.
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]*)"')
# Names of arguments that can stand in all formats.
_KEY = re.compile(r"[^\s<>\"'=&:,(){}\[\]]{1,128}")


class CallGrammar:
    """The grammar of the calls of some tools; its methods raise `ConfigError` for a bad schema.

    So does its constructor if llguidance is missing, or cannot read the tokenizer. ``is_last`` is
    whether nothing can follow a call, as no marker ends it.
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
        """Return the grammar of the text after the marker of a call, later calls if it is whole."""
        rest = " (BLANK? block)*" if is_whole and self._has_blocks else ""
        return self._compile(f"body{rest}")

    def whole(self, other: str | None) -> Grammar:
        """Return the grammar of a text of calls, or of another text, a term in Lark's format."""
        calls = "block (BLANK? block)*" if self._has_blocks else "block"
        alternative = "" if other is None else f" | other\nother: {other}"
        return self._compile(f"{calls}{alternative}")

    @property
    def _has_blocks(self) -> bool:
        """Whether several calls are several blocks, each with its own markers."""
        return self.tools.is_parallel and self._form.again is None

    def _compile(self, start: str) -> Grammar:
        form, functions = self._form, self.tools.callable
        try:
            rules = CallRules(self._tokenizer, self._vocabulary)
            body, end = "call", rules.spell(self._end)
            if form.again is not None and self.tools.is_parallel:
                body += f" ({rules.spell(form.again)} call)*"
            first, last = map(rules.spell, form.around)
            # Templates write a line break on either side of a call.
            after = f'"\\n"? {end}' if end else ""
            calls = [rules.add("call", self._write(one, rules)) for one in functions]
            rules.define("start", start)
            rules.define("BLANK", "/[ \\n]{1,4}/")
            rules.define("block", f"{rules.spell(self._begin)} body")
            rules.define("body", f'"\\n"? {first} {body} {last} {after}')
            rules.define("call", " | ".join(calls))
            return Grammar.lark(rules.joined, scale=16)  # the rules of many tools are not deep
        except ConfigError:
            for function in functions:
                self._check(function)
            raise

    def _check(self, function: dict[str, Any]) -> None:
        """Raise `ConfigError` with the name of a tool if its schema alone cannot be used."""
        try:
            rules = CallRules(self._tokenizer, self._vocabulary)
            rules.define("start", self._write(function, rules))
            Grammar.lark(rules.joined)
        except ConfigError as error:
            raise ConfigError(f"{function['name']}: {error}") from error

    def _write(self, function: dict[str, Any], rules: CallRules) -> str:
        name, form, lenient = function["name"], self._form, not function.get("strict")
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigError("the name of a tool must consist of letters, digits, _ and -")
        given = function.get("parameters") or {"additionalProperties": False}
        schema = {"type": "object", **leave_out(given, lambda key, _: key in NOTES)}
        term = lark_json(schema, lenient)
        if form.quote or form.before:
            Grammar.lark(f"start: {term}")  # checks the schema as a whole
        if form.quote:
            term = QuotedValues(form.quote, rules, schema, lenient).write(schema)
        elif form.before:
            term = self._write_keyed(form, rules, schema, lenient)
        return f"{rules.spell(form.head.replace('$name', name))} {term} {rules.spell(form.tail)}"

    def _write_keyed(
        self, form: CallFormat, rules: CallRules, schema: dict[str, Any], lenient: bool
    ) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if unknown := set(required) - set(properties):
            raise ConfigError(f"required names {min(unknown)!r}, which is no property")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        items = []
        for key, value in properties.items():
            if not _KEY.fullmatch(key):
                raise ConfigError(f"the name of an argument must fit in a tag, got {key!r}")
            text = form.before.replace("$key", key).replace("$type", _type_of(form, value))
            if not form.is_bare(value):
                # An argument's own schema has only the definitions of the whole one.
                if found := _OTHER_REFERENCE.search(json.dumps(value)):
                    raise ConfigError(f"$ref must go into $defs, got {found[1]!r}")
                inner = {**value, **definitions} if isinstance(value, dict) else {}
                json_value = rules.add("value", lark_json(inner, lenient))
                term = f"{json_value} {rules.spell(form.after)}"
            elif "enum" in value or "const" in value:
                term = rules.choice(value.get("enum", [value.get("const")]), form.after)
            else:
                term = rules.text(value, form.after, form.has_cdata)
            items.append((f"{rules.spell(text)} {term}", key in required))
        return rules.sequence(items, rules.spell(form.between))


def _type_of(form: CallFormat, schema: Any) -> str:
    """Return the JSON type of an argument, for formats that name it."""
    if form.is_bare(schema):
        return "string"
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind if isinstance(kind, str) and kind != "string" else "object"

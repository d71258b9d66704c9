"""Rules of grammars of tool calls: texts, strings without JSON's quotes, lists of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.grammar import lark_json

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Number of a call, in formats that count them.
_NUMBER = "/[0-9]{1,3}/"
# Key of an object that has any keys.
_ANY_KEY = r"/\w{1,64}/"
# Keywords of JSON schemas that `QuotedValues` reads, by type.
_READ = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
}


class CallRules:
    """Rules of a grammar, of which equal ones are written once."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: LLTokenizer) -> None:
        self._lines: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._count = 0
        added, is_special = tokenizer._tokenizer.added_tokens_decoder, vocabulary.is_special_token
        self._special = {str(token): i for i, token in added.items() if is_special(i)}
        listed = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._parts = re.compile(rf"({listed}|\$number)" if listed else r"(\$number)")

    @property
    def joined(self) -> str:
        return "\n".join(self._lines.values())

    def add(self, prefix: str, term: str, options: str = "") -> str:
        if term not in self._names:
            self._names[term] = self.reserve(prefix)
            self.define(self._names[term], term, options)
        return self._names[term]

    def reserve(self, prefix: str) -> str:
        """Return a new name, for a rule that `define` adds."""
        self._count += 1
        return f"{prefix}_{self._count}"

    def define(self, name: str, term: str, options: str = "") -> None:
        """Add a rule, unless there is one with that name."""
        self._lines.setdefault(name, f"{name}{options}: {term}")

    def spell(self, text: str) -> str:
        """Return terms for a text: ids of special tokens, and any number for ``$number``."""
        terms = []
        for part in filter(None, self._parts.split(text)):
            is_special = part in self._special
            term = _NUMBER if part == "$number" else json.dumps(part)
            terms.append(f"<[{self._special[part]}]>" if is_special else term)
        return " ".join(terms)

    def text(self, schema: Mapping[str, Any], end: str, has_cdata: bool = False) -> str:
        """Return a term for a string without quotes, and the first text that may end it.

        With ``has_cdata`` the string is in a CDATA section if XML needs that.
        """
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        length, close, spelled = f"{{{low},{high}}}", _pattern(end), self.spell(end)
        if "<[" in spelled:
            if high == 0:
                return spelled
            body = f"/(?s:.{{{max(low, 1)},{high}}})/ & ~/(?s:.*){close}(?s:.*)/"
            return f"{self.add('TEXT', body)}{'' if low else '?'} {spelled}"
        body = f"(?s:.{length}){close}"
        if has_cdata:
            body = rf"[^<&\n]{length}{close}|<!\[CDATA\[(?s:.{length})\]\]>{close}"
        # Without this, an end among the first characters would count as a part of the string.
        rest = f" & ~/(?s:.{{0,{low - 1}}}){close}(?s:.+)/" if low else ""
        return self.add("text", self.add("TEXT", f"/{body}/{rest}"), "[lazy]")

    def choice(self, texts: Sequence[str], end: str) -> str:
        """Return a term for one of some texts without quotes, and the text that ends it.

        One pattern takes thousands of texts, where as many terms exceed llguidance's limits.
        """
        spelled, choices = self.spell(end), "|".join(map(_pattern, sorted(filter(None, texts))))
        empty = "?" if "" in texts else ""
        if "<[" in spelled:
            return f"{self.add('CHOICE', f'/{choices}/')}{empty} {spelled}" if choices else spelled
        return self.add("CHOICE", f"/({choices}){empty}{_pattern(end)}/")

    def sequence(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Return a term for items in their order, each with a term between it and the next, if any.

        An item is a term, and whether it is required.
        """
        if not between:
            return " ".join(term if is_required else f"({term})?" for term, is_required in items)
        if not items:
            return ""
        term, is_required = self._join(items, between)
        return term if is_required else f"({term})?"

    def _join(self, items: Sequence[tuple[str, bool]], between: str) -> tuple[str, bool]:
        """Return a term for at least one of some items, and whether any of them is required.

        The items are halved, so that the rules of hundreds of them are neither long nor deep.
        """
        if len(items) == 1:
            return self.add("item", items[0][0]), items[0][1]
        half = len(items) // 2
        first, needs_first = self._join(items[:half], between)
        last, needs_last = self._join(items[half:], between)
        if needs_last:
            head = f"{first} {between}"
            whole = f"{head if needs_first else f'({head})?'} {last}"
        else:
            begun = f"{first} ({between} {last})?"
            whole = begun if needs_first else _either([begun, last])
        return self.add("items", whole), needs_first or needs_last


@dataclass
class QuotedValues:
    """Values whose strings stand between special quotes, and whose keys have no quotes.

    References go into the JSON schema ``root``, which llguidance accepts, and ``references`` has
    the names of their rules. ``lenient`` leaves out keywords that are not supported.
    """

    quote: str
    rules: CallRules
    root: Mapping[str, Any]
    lenient: bool
    references: dict[str, str] = field(default_factory=dict)

    def write(self, schema: Any) -> str:
        """Return a term for the values that fit a schema, whose keywords must be supported."""
        if not isinstance(schema, dict):
            return self._any()
        if "$ref" in schema:
            return self._refer(schema["$ref"])
        if "enum" in schema or "const" in schema:
            return self._choose(schema["enum"] if "enum" in schema else [schema["const"]])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return _either(list(map(self.write, schema[word])))
        if len(schema.get("allOf", ())) == 1:
            return self.write(schema["allOf"][0])
        kind = schema.get("type")
        if isinstance(kind, list):
            return _either([self.write({**schema, "type": one}) for one in kind])
        if kind in ("integer", "number", "boolean", "null"):
            return lark_json(schema, self.lenient)
        unread = schema.keys() - _READ.get(str(kind), set()) - {"type", "$defs", "definitions"}
        if unread and not self.lenient:
            raise ConfigError(f"the format of this model's calls has no {min(unread)}")
        if kind == "string":
            return f"{self.rules.spell(self.quote)} {self.rules.text(schema, self.quote)}"
        if kind == "object":
            return f'"{{" {self._members(schema)} "}}"'
        return self._elements(schema) if kind == "array" else self._any()

    def _choose(self, values: Sequence[Any]) -> str:
        texts = [value for value in values if isinstance(value, str)]
        others = (value for value in values if not isinstance(value, str))
        terms = [self.rules.spell(self._spell(value)) for value in others]
        if any(self.quote in text for text in texts):
            raise ConfigError(f"a constant must be without {self.quote}")
        if texts:
            terms.append(f"{self.rules.spell(self.quote)} {self.rules.choice(texts, self.quote)}")
        return _either(terms)

    def _members(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        more = schema.get("additionalProperties", True)
        if properties or more is False:
            if unknown := set(required) - set(properties):
                raise ConfigError(f"required names {min(unknown)!r}, which is no property")
            items = [
                (f"{self.rules.spell(self._key(key) + ':')} {self.write(one)}", key in required)
                for key, one in properties.items()
            ]
            return self.rules.sequence(items, '","')
        one = self.rules.add("member", f'{_ANY_KEY} ":" {self.write(more)}')
        return f'({one} ("," {one})*)?'

    def _elements(self, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[" "]"'
        one = self.rules.add("element", self.write(schema.get("items")))
        more = f'("," {one}){{{max(0, low - 1)},{"" if high is None else high - 1}}}'
        listed = one if high == 1 else f"{one} {more}"
        return f'"[" ({listed}){"" if low else "?"} "]"'

    def _any(self) -> str:
        quote, scalar = self.rules.spell(self.quote), {"type": ["number", "boolean", "null"]}
        members = f'"{{" ({_ANY_KEY} ":" any ("," {_ANY_KEY} ":" any)*)? "}}"'
        term = f"{quote} {self.rules.text({}, self.quote)} | {lark_json(scalar)} | {members}"
        self.rules.define("any", f'{term} | "[" (any ("," any)*)? "]"')
        return "any"

    def _refer(self, reference: str) -> str:
        """Return the name of the rule for a reference, which may be within itself."""
        if reference not in self.references:
            name = self.references[reference] = self.rules.reserve("reference")
            self.rules.define(name, self.write(self._find(reference)))
        return self.references[reference]

    def _find(self, reference: str) -> Any:
        found: Any = self.root
        try:
            for key in reference.removeprefix("#").split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                found = found[int(key) if isinstance(found, list) else key]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ConfigError(f"$ref names {reference!r}, which is not there") from error
        return found

    def _key(self, key: str) -> str:
        if self.quote in key or not re.fullmatch(r"[^\s:{}]([^:{}\n]*[^\s:{}])?", key):
            raise ConfigError(f"the name of an argument must be without : and braces, got {key!r}")
        return key if re.fullmatch(r"\w+", key) else f"{self.quote}{key}{self.quote}"

    def _spell(self, value: Any) -> str:
        if isinstance(value, dict):
            members = (f"{self._key(key)}:{self._spell(one)}" for key, one in value.items())
            return f"{{{','.join(members)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._spell, value))}]"
        if isinstance(value, str):
            if self.quote in value:
                raise ConfigError(f"a constant must be without {self.quote}")
            return f"{self.quote}{value}{self.quote}"
        return json.dumps(value)


def _either(terms: Sequence[str]) -> str:
    return f"({' | '.join(terms)})"


def _pattern(text: str) -> str:
    """Return a pattern for a text, for use between slashes."""
    return "".join(
        f"\\x{{{ord(one):x}}}" if one < " " or one in "/\x7f" else re.escape(one) for one in text
    )

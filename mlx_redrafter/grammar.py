"""Structured output: grammars for generated text, compiled by llguidance (extra ``grammar``)."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from mlx_redrafter.checks import check_instance, check_int
from mlx_redrafter.errors import ConfigError, describe_error, how_to_install, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Maximum length of a grammar, in characters.
MAX_CHARACTERS = 1 << 17
# Maximum number of rules, lines or references: llguidance recurses from one to the next, and its
# stack ends after some thousands.
MAX_RULES = 500
# Maximum number of patterns that one text may have to match: with each, the time and memory of
# llguidance may double, whatever its limits are. 16 took 0.1 s, and 40 nine minutes and 20 GB.
MAX_PATTERNS = 16
# Maximum number of a `multipleOf`, except for powers of ten: llguidance has a state for every
# remainder. 99,991 took 1 s, 604,800 3.5 s, and 50,000,017 more than 95 s and 2.8 GB.
MAX_MULTIPLE = 10_000
# Keywords of a JSON schema that add a pattern.
PATTERNS = frozenset({"pattern", "format"})
# Keywords whose schemas hold for the same value as the other keywords next to them.
JOINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Words of a JSON schema that do not change what fits it, and take most of its length.
NOTES = frozenset({"$schema", "$id", "$comment", "title", "description", "examples", "default"})
# Keywords whose members have names of the author's choice.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# Keywords that say nothing about the value.
SILENT = NOTES | {"$defs", "definitions", "deprecated", "readOnly", "writeOnly", "x-guidance"}
# Maximum number of states that llguidance follows at once. A property that may be missing adds
# four; its own limit of 2000 would end a text of 500 such properties.
MAX_STATES = 1 << 14
# Pattern of blanks in JSON. A bound keeps a model from writing blanks for ever.
WHITESPACE = r"( |\n[ \t]{0,20})?"

# Vocabularies by tokenizer, because reading one costs as much time as many tokens.
_vocabularies: weakref.WeakKeyDictionary[Any, dict[Any, LLTokenizer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """A validated grammar that constrains a text; ``source`` is in llguidance's format.

    Make one with `json_schema`, `json_object`, `regex` or `lark`. They raise `ConfigError` if the
    grammar is malformed, too large, or satisfied by no text, and if llguidance is missing.
    """

    source: str = field(repr=False)

    def __post_init__(self) -> None:
        check_instance("grammar", self.source, str, "a string")
        validate = _guidance().LLMatcher.validate_grammar_with_warnings
        is_error, messages = validate(self.source, limits=_limits())
        if is_error:
            raise _refusal(messages[0])

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """Require JSON that fits a JSON schema, given as an object or as text."""
        text = _schema_text(schema)
        options = {"whitespace_pattern": WHITESPACE}
        return cls(_convert("grammar_from_json_schema", text, overrides=options))

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Require a text that a regular expression matches as a whole.

        llguidance knows neither look-around nor back-references.
        """
        check_instance("grammar", pattern, str, "a string")
        _check_size(pattern, 0, "rules")
        return cls(_convert("grammar_from_regex", pattern))

    @classmethod
    def lark(cls, rules: str, scale: int = 1) -> Grammar:
        """Require a text that a context-free grammar in Lark's format derives from ``start``.

        ``scale`` multiplies the maximum numbers of lines and characters; more than 1 needs rules of
        little depth.
        """
        check_instance("grammar", rules, str, "a string")
        check_int("scale", scale, 1)
        _check_size(rules, len(rules.splitlines()), "lines", scale)
        return cls(_convert("grammar_from_lark", rules))

    def matcher(self, tokenizer: TokenizerWrapper, vocab_size: int) -> LLMatcher:
        """Create the state machine that follows a text token by token.

        ``vocab_size`` is the number of tokens that the model chooses from, V. Raise `ConfigError`
        if llguidance cannot read the tokenizer's vocabulary, the tokenizer has no end-of-sequence
        token, or the grammar is too complex.
        """
        vocabulary = read_vocabulary(tokenizer, vocab_size)
        matcher = _guidance().LLMatcher(vocabulary, self.source, log_level=0, limits=_limits())
        if error := matcher.get_error():
            raise _refusal(error)
        return matcher


@dataclass(frozen=True)
class LateGrammar:
    """Grammars of the text after a marker, by marker; until one comes, all tokens are allowed.

    With ``is_last`` the text ends where the grammar ends. Otherwise all tokens are allowed from
    there to the next marker, so the grammar must end in a way that nothing can extend.
    ``may_end_before`` is whether the text may end without a marker.
    """

    grammars: Mapping[str, Grammar]
    is_last: bool = False
    may_end_before: bool = True


def lark_json(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """Return a term of Lark's format that requires JSON which fits a JSON schema.

    ``lenient`` leaves out keywords that llguidance does not support, and patterns and multiples if
    there are too many. Raise `ConfigError` if the schema is malformed or too large.
    """
    if lenient and _describe_slow(schema):
        hard = {*PATTERNS, "multipleOf"}
        schema = leave_out(
            schema, lambda key, one: key in hard and isinstance(one, str | float | int)
        )
    _schema_text(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        # One spelling for every name, so that references can be counted.
        values = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(values, allow_nan=False)
        if not isinstance(values, Mapping):
            raise TypeError(f"expected an object, got {text[:40]}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"grammar must be a JSON schema: {describe_error(error)}") from error
    _check_size(text, text.count('"$ref"'), "references")
    if problem := _describe_slow(values):
        raise ConfigError(f"grammar must have {problem}; leave some out")
    return text


def _describe_slow(schema: Any) -> str:
    """Describe what llguidance would need too long for, if anything: "" if nothing."""
    patterns: set[tuple[str, str]] = set()
    multiples: set[int] = set()
    is_joined, unread = False, [schema]
    while unread:
        one = unread.pop()
        if isinstance(one, Mapping):
            found = one.keys() & JOINING
            branches = one.get("allOf")
            has_many = isinstance(branches, list) and len(branches) > 1
            is_joined |= has_many or (bool(found) and len(one.keys() - SILENT) > 1)
            patterns |= {(key, one[key]) for key in PATTERNS if isinstance(one.get(key), str)}
            multiples |= {_without_point(one.get("multipleOf"))}
            unread += one.values()
        elif isinstance(one, list):
            unread += one
    where = "if schemas are combined, as by allOf or by a reference beside other keywords"
    if is_joined and len(patterns) > MAX_PATTERNS:
        kinds = f"at most {MAX_PATTERNS} different patterns and formats"
        return f"{kinds} {where}, found {len(patterns)}"
    hard = [one for one in multiples if str(one).rstrip("0") != "1"]
    if hard and (math.prod(multiples) if is_joined else max(hard)) > MAX_MULTIPLE:
        kinds = f"a power of ten or at most {MAX_MULTIPLE} as multipleOf, also as their product"
        return f"{kinds} {where}, found {shown(max(hard))}"
    return ""


def _without_point(number: Any) -> int:
    """Return a number without the decimal point that it needs; 1 for what is no positive number."""
    if type(number) is int:  # of any size, where decimal numbers are rounded
        return max(1, number)
    if type(number) is not float or not 0 < number < math.inf:
        return 1
    value = Decimal(repr(number)).normalize()
    return int(value.scaleb(max(0, -int(value.as_tuple().exponent))))


def leave_out(schema: Any, is_dropped: Callable[[str, Any], bool]) -> Any:
    """Leave keywords out of a schema and of those in it, chosen by their names and values."""
    if isinstance(schema, list):
        return [leave_out(one, is_dropped) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("const", "enum"):  # these hold values, not schemas
            found[key] = value
        elif key in NAMED and isinstance(value, Mapping):
            found[key] = {name: leave_out(one, is_dropped) for name, one in value.items()}
        elif not is_dropped(key, value):
            found[key] = leave_out(value, is_dropped)
    return found


def read_vocabulary(tokenizer: TokenizerWrapper, vocab_size: int) -> LLTokenizer:
    """Read a tokenizer's vocabulary, once, for a model of ``vocab_size`` tokens.

    Raise `ConfigError` if llguidance cannot read it, or it has no end-of-sequence token.
    """
    from transformers import PreTrainedTokenizerFast

    inner, ends = tokenizer._tokenizer, sorted(tokenizer.eos_token_ids)
    if not isinstance(inner, PreTrainedTokenizerFast):
        raise ConfigError(
            "grammar needs a fast tokenizer of Hugging Face, with its vocabulary in tokenizer.json "
            f"or tokenizer.model; this one is {type(inner).__name__}"
        )
    if not ends:
        raise ConfigError("grammar needs a tokenizer with a token that ends a text; it has none")
    known = _vocabularies.setdefault(inner, {})
    key = vocab_size, *ends
    if key not in known:
        _guidance()
        from llguidance.hf import from_tokenizer

        size = max(vocab_size, len(inner))
        try:
            known[key] = from_tokenizer(inner, n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise ConfigError(
                f"grammar cannot read the tokenizer: {describe_error(error)}"
            ) from error
    return known[key]


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"grammar needs llguidance: {how_to_install('grammar')}") from error
    return llguidance


def _limits() -> LLParserLimits:
    """Return limits of time and memory, with messages that omit the grammar."""
    return _guidance().LLParserLimits(verbose_errors=False, max_items_in_row=MAX_STATES)


def _convert(name: str, text: str, **options: Any) -> str:
    convert = getattr(_guidance().LLMatcher, name)
    try:
        return convert(text, **options)
    except ValueError as error:  # too deep, a number out of range, half of a surrogate pair
        raise _refusal(str(error)) from error


def _refusal(message: str) -> ConfigError:
    # The parser of regular expressions draws the place before it names the error.
    reason = describe_error(ValueError(re.sub(r"(?ms)\n.*?^error: ", " ", message)))
    return ConfigError(f"grammar cannot be used: {reason}; correct or simplify it")


def _check_size(text: str, num_rules: int, kind: str, scale: int = 1) -> None:
    sizes = (len(text), MAX_CHARACTERS, "characters"), (num_rules, MAX_RULES, kind)
    for found, limit, what in sizes:
        if found > scale * limit:
            raise ConfigError(f"grammar must have at most {scale * limit} {what}, got {found}")

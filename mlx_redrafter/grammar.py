"""Grammars that texts are held to, by llguidance (the extra ``grammar``)."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.escaping import describe_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_CHARACTERS = 1 << 17
# llguidance follows a rule into the next one on the stack, which ends after some thousands.
MAX_RULES = 500
# Without a bound a model may write blanks for ever, all of them good JSON.
WHITESPACE = r"( |\n[ \t]{0,20})?"

# Vocabularies by tokenizer: to read one takes as long as many tokens.
_vocabularies: weakref.WeakKeyDictionary[Any, dict[Any, LLTokenizer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """What a text must be, checked.

    Make one with `json_schema`, `json_object`, `regex` or `lark`. They raise `ConfigError` for
    what is no such grammar, no text can satisfy, or is too large, and where llguidance is missing.

    Attributes:
        source: The grammar as llguidance has it.
    """

    source: str = field(repr=False)

    def __post_init__(self) -> None:
        validate = _guidance().LLMatcher.validate_grammar_with_warnings
        is_error, messages = validate(self.source, limits=_limits())
        _check(messages[0] if is_error else "")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """JSON that fits a JSON schema.

        Args:
            schema: The schema, or its text.
        """
        try:
            # Written anew, so that a name is spelt in one way only.
            values = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(values)
            if not isinstance(values, Mapping):
                raise TypeError(f"expected an object, got {text[:40]}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"grammar must be a JSON schema: {describe_error(error)}") from error
        _check_size(text, text.count('"$ref"'), "references")
        options = {"whitespace_pattern": WHITESPACE}
        return cls(_guidance().LLMatcher.grammar_from_json_schema(text, overrides=options))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What a regular expression matches as a whole, without look-around and back-references."""
        _check_size(pattern, 0, "rules")
        return cls(_guidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """What a context-free grammar in the form of Lark derives from ``start``."""
        _check_size(rules, len(rules.splitlines()), "lines")
        return cls(_guidance().LLMatcher.grammar_from_lark(rules))

    def matcher(self, tokenizer: TokenizerWrapper, vocab_size: int) -> LLMatcher:
        """What follows a text token by token.

        Args:
            tokenizer: Tokenizer of the model.
            vocab_size: Number of tokens that the model chooses from, V.

        Raises:
            ConfigError: The tokenizer has no vocabulary that llguidance can read, or no token
                that ends a text; or the grammar is too complex for it.
        """
        vocabulary = _vocabulary(tokenizer, vocab_size)
        matcher = _guidance().LLMatcher(vocabulary, self.source, log_level=0, limits=_limits())
        _check(matcher.get_error())
        return matcher


def _vocabulary(tokenizer: TokenizerWrapper, vocab_size: int) -> LLTokenizer:
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
        raise ConfigError("grammar needs llguidance: install mlx-redrafter[grammar]") from error
    return llguidance


def _limits() -> LLParserLimits:
    """llguidance's own limits of time and memory, without the grammar in its messages."""
    return _guidance().LLParserLimits(verbose_errors=False)


def _check(message: str) -> None:
    if message:
        raise ConfigError(f"grammar cannot be used: {describe_error(ValueError(message))}")


def _check_size(text: str, num_rules: int, kind: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"grammar must be a text, got {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"grammar must have at most {MAX_CHARACTERS} characters, got {len(text)}")
    if num_rules > MAX_RULES:
        raise ConfigError(f"grammar must have at most {MAX_RULES} {kind}, got {num_rules}")

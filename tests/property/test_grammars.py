"""A text under a grammar is plain decoding's under the same masks, whatever is drafted."""

import json
import random
import re
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter import Grammar, generate_batch, stream_generate
from mlx_redrafter.decoding.grammar_masks import GrammarMasks
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.grammar import lark_json
from tests.helpers.drafts import Scripted
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens
from tests.helpers.models import fast_tokenizer, random_drafter, tiny_llama, wrapped_tokenizer

llguidance: Any = pytest.importorskip("llguidance", reason="needs mlx-redrafter[grammar]")

TOKENIZER = fast_tokenizer()
VOCAB_SIZE = 272  # more than the tokenizer has, as with padded models
MODEL = tiny_llama(vocab_size=VOCAB_SIZE, spread=2.0)
PROMPT = [72, 101, 80]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": -99, "maximum": 99},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["red", "green"]}},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
TREE = {"beam_width": 3, "beam_length": 4, "tree_nodes": 9}
CHAIN = {"beam_width": 1, "beam_length": 5}


def _write(grammar: Grammar, **options: Any) -> tuple[list[int], str]:
    options = {"drafter": None, **options}
    responses = list(
        stream_generate(MODEL, TOKENIZER, PROMPT, grammar=grammar, max_tokens=150, **options)
    )
    return [one.token for one in responses], "".join(one.text for one in responses)


class Reference:
    """A logits processor for stock mlx-lm: a new matcher for every token."""

    def __init__(self, grammar: Grammar):
        from llguidance.hf import from_tokenizer

        self.vocabulary: Any = from_tokenizer(TOKENIZER._tokenizer, n_vocab=VOCAB_SIZE, eos_token=0)
        self.source = grammar.source

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        written = np.array(tokens).tolist()[len(PROMPT) :]
        if 0 in written:
            return logits
        matcher = llguidance.LLMatcher(self.vocabulary, self.source)
        assert matcher.try_consume_tokens(written) == len(written)
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[:VOCAB_SIZE]
        return mx.array(np.where(allowed, np.array(logits), -np.inf).astype(np.float32))


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_texts_are_stock_mlx_lms_under_the_same_masks(temp):
    grammar = Grammar.json_schema(SCHEMA)
    mx.random.seed(5)
    options: dict[str, Any] = {"sampler": make_sampler(temp=temp)}
    scored = stock_tokens(MODEL, PROMPT, 150, logits_processors=[Reference(grammar)], **options)
    expected = ids(scored)
    assert 0 in expected, "the text has no end"
    scored = scored[: expected.index(0) + 1]
    script = Scripted(ids(scored), VOCAB_SIZE)
    for drafter, shape in ((None, {}), (script, TREE), (script, CHAIN), ("lookup", CHAIN)):
        mx.random.seed(5)
        tokens, text = _write(grammar, drafter=drafter, **options, **shape)
        assert_same_tokens(scored, tokens, shape)
        assert json.loads(text).keys() == {"name", "size", "tags"}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema that bounds the length of what fits it."""
    kinds = ["string", "integer", "boolean", "null", "enum"] + ["object", "array"] * 2 * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["a", "bb", 3, None, True], rng.randint(1, 4))}
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        schema["maxLength"] = rng.randint(0, 6)
    elif kind == "integer":
        schema |= {"minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 500)}
    elif kind == "array":
        schema |= {"items": random_schema(rng, depth - 1), "maxItems": rng.randint(0, 2)}
    elif kind == "object":
        names = rng.sample(["x", "name", "two words"], rng.randint(1, 3))
        schema["properties"] = {name: random_schema(rng, depth - 1) for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.7]
        schema["additionalProperties"] = False
    return schema


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is as `random_schema` asks; not by llguidance."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    kind = schema["type"]
    types: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
    types |= {"array": list, "object": dict}
    if type(value) is not types[kind]:
        return False
    if kind == "string":
        return len(value) <= schema["maxLength"]
    if kind == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if kind == "array":
        return len(value) <= schema["maxItems"] and all(fits(one, schema["items"]) for one in value)
    if kind == "object":
        properties = schema["properties"]
        has_names = set(schema["required"]) <= value.keys() <= properties.keys()
        return has_names and all(fits(one, properties[name]) for name, one in value.items())
    return True


@pytest.mark.parametrize("seed", range(6))
def test_random_schemas_are_met_with_and_without_drafts(seed):
    rng = random.Random(seed)
    for _ in range(2):
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        schema |= {"properties": {"it": random_schema(rng)}, "required": ["it"]}
        grammar = Grammar.json_schema(json.dumps(schema))
        options: dict[str, Any] = {"temp": 1.0, "seed": seed}
        tokens, text = _write(grammar, **options)
        assert tokens[-1] == 0, text
        assert fits(json.loads(text), schema), (text, schema)
        script = Scripted(tokens, VOCAB_SIZE)
        assert _write(grammar, drafter=script, **options, **TREE)[0] == tokens
    drafter = random_drafter(VOCAB_SIZE, 32)
    assert _write(grammar, drafter=drafter, **options, **TREE)[0] == tokens


def test_other_grammars_and_processors():
    text = _write(Grammar.regex("[ab]{3}-[0-9]+"), temp=1.0, seed=1)[1]
    assert re.fullmatch("[ab]{3}-[0-9]+", text)
    rules = 'start: "(" start ")" | "x"'
    no_nesting = mx.zeros((VOCAB_SIZE,)).at[8].add(-1e9)  # token of "("

    def flat(_: mx.array, logits: mx.array) -> mx.array:
        return logits + no_nesting

    assert TOKENIZER.encode("(", add_special_tokens=False) == [8]
    assert _write(Grammar.lark(rules), logits_processors=[flat])[1] == "x"
    assert isinstance(json.loads(_write(Grammar.regex(r"\{\}"), drafter="lookup")[1]), dict)


def _refs(count: int) -> dict[str, Any]:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "null"}}}


_ANY_OF = [{"properties": {f"x{i}": {}}} for i in range(12)]
_PATTERNS: list[Any] = [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(24)]
HOSTILE: dict[str, tuple[str, Any]] = {
    "no object": ("must be a JSON schema", "[1]"),
    "unknown type": ("cannot be used", {"type": "nothing"}),
    "impossible": ("cannot be used", {"type": "integer", "minimum": 5, "maximum": 1}),
    "fetched": ("cannot be used", {"$ref": "http://127.0.0.1:9/schema"}),
    "nested": ("cannot be used: recursion limit", '{"not":' * 200 + "{}" + "}" * 200),
    "large number": ("cannot be used: number out of range", {"maximum": 10**400}),
    "long number": ("must be a JSON schema", '{"maximum":' + "9" * 5000 + "}"),
    "infinite number": ("must be a JSON schema", '{"maximum":1e400}'),
    "half a surrogate pair": ("cannot be used", {"const": "\ud800"}),
    "deep": ("", '{"not":' * 5000 + "{}" + "}" * 5000),
    "many references": ("at most 500 references", _refs(2000)),
    "spelt otherwise": ("at most 500", json.dumps(_refs(2000)).replace('"$ref"', '"\\u0024ref"')),
    "huge": ("at most 131072 characters", {"enum": ["a" * 2**18]}),
    "exponential": ("cannot be used", {"allOf": [{"anyOf": _ANY_OF}] * 6}),
    "joined patterns": ("at most 16 different patterns", {"allOf": _PATTERNS}),
    "joined objects": (
        "at most 16 different patterns",
        {"allOf": [{"type": "object", "properties": {"x": one}} for one in _PATTERNS]},
    ),
    "a large multiple": ("a power of ten or at most 10000", {"multipleOf": 50000017}),
    "a long multiple": ("a power of ten or at most 10000", {"multipleOf": 604.8003}),
    "joined multiples": (
        "a power of ten or at most 10000",
        {"allOf": [{"multipleOf": 9973}, {"multipleOf": 1e6}]},
    ),
    "a chain of patterns": (
        "at most 16 different patterns",
        reduce(lambda inner, one: {**one, "allOf": [inner]}, _PATTERNS),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_rejected_in_no_time(name):
    message, schema = HOSTILE[name]
    with pytest.raises(ConfigError, match=f"grammar .*{message}"):
        Grammar.json_schema(schema)


def test_patterns_of_different_values_are_free():
    """And those of tools that are not strict are left out if there are too many."""
    properties: dict[str, Any] = {f"p{i}": one for i, one in enumerate(_PATTERNS)}
    properties["pattern"] = {"anyOf": [_PATTERNS[1], {"type": "null"}], "default": None}
    Grammar.json_schema({"type": "object", "properties": properties})
    for many in (_PATTERNS, [{"multipleOf": 10**7 + 19}], [{"multipleOf": 10**4300 - 1}]):
        term = lark_json({"type": "object", "properties": {"x": {"allOf": many}}}, lenient=True)
        Grammar.lark(f"start: {term}")


@pytest.mark.parametrize("number", [7, 86.4, 0.01, 10**9, 9973])
def test_small_multiples_and_powers_of_ten_are_allowed(number):
    for schema in ({"multipleOf": number}, {"allOf": [{"multipleOf": number}, {"minimum": 1}]}):
        Grammar.json_schema(schema).matcher(TOKENIZER, VOCAB_SIZE)


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
def test_other_grammars_are_checked(make):
    for given, message in ((5, "must be a string, got 5"), ('"\ud800"', "cannot be used")):
        with pytest.raises(ConfigError, match=f"grammar {message}"):
            make(given)


def test_what_does_not_go_together_is_named():
    grammar = Grammar.json_object()
    with pytest.raises(ConfigError, match=r"grammar must be a Grammar"):
        generate_batch(MODEL, TOKENIZER, ["a"], drafter=None, grammar={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fast tokenizer"):
        stream_generate(MODEL, wrapped_tokenizer(64), [1], drafter=None, grammar=grammar)
    with pytest.raises(ConfigError, match=r"grammar must be a Grammar"):
        stream_generate(MODEL, TOKENIZER, [1], drafter=None, grammar={})  # type: ignore[arg-type]
    options: Any = {"drafter": None, "grammar": grammar, "sampler": lambda _: mx.array([5])}
    with pytest.raises(NonFiniteError, match="a sampler has broken"):
        list(stream_generate(MODEL, TOKENIZER, [1], **options))


def test_a_branch_that_breaks_the_matcher_leaves_the_others():
    """As the limits of llguidance do; here the matcher says so of one token."""
    broken = TOKENIZER.encode("b", add_special_tokens=False)[0]
    good = TOKENIZER.encode("a", add_special_tokens=False)[0]
    matcher = Grammar.regex("[ab]{9}").matcher

    class Fragile:
        def __init__(self) -> None:
            self.inner, self.is_broken = matcher(TOKENIZER, VOCAB_SIZE), False

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.is_broken |= broken in tokens
            return 0 if self.is_broken else self.inner.try_consume_tokens(tokens)

        def is_error(self) -> bool:
            return self.is_broken

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    masks = GrammarMasks(Fragile)  # type: ignore[arg-type]
    masks.extend([good])
    rows = masks.apply(mx.zeros((4, VOCAB_SIZE)), [good, broken, good, good], [0, 0, 0, 2])
    allowed = np.isfinite(np.array(rows)).sum(axis=1).tolist()
    assert allowed == [2, 0, 2, 2]

"""Calls of the public Python API with values of any kind end well, or in one line.

An error is one of this package, or Python's own TypeError about names and numbers of arguments.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

import mlx_redrafter as api
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.proposers.checkpoint import save_drafter
from tests.helpers.hostile import JSON_VALUES, MOST_CHARACTERS
from tests.helpers.models import random_drafter, tiny_llama

# Number of random calls.
NUM_CALLS = 200
# Tokens that are read of a text.
FEW = 4
# Parts of the messages of Python's own errors about signatures.
SIGNATURE = ("unexpected keyword argument", "required positional", "multiple values", "positional")
# Values of wrong types, or out of range.
VALUES: tuple[Any, ...] = (
    *JSON_VALUES, b"ab", {1, 2}, range(3), object(), Exception, 1j, Path("/nowhere"), [[1], ["a"]],
    (), "lookup", [-1], [2**31], [[2**40]], [True], mx.zeros((2, 2)), mx.array([10**7]),
    float("inf"),
)  # fmt: skip
# Samplers and processors that return wrong values.
FUNCTIONS: tuple[Any, ...] = (
    lambda *_: None, lambda *_: "a", lambda *_: mx.array([10**7]), lambda *_: mx.array([-5]),
    lambda *_: mx.array([[1, 2], [3, 4]]), lambda *_: mx.array(0.5), lambda a, b=None: a,
    lambda: None, lambda *_: mx.array(float("nan")), lambda *_: 3,
)  # fmt: skip


class Yard:
    """A tiny model with its drafter, and calls of the API that succeed."""

    def __init__(self, folder: Path):
        tokenizer = load_tokenizer(find_bundled("target"))
        inner = tokenizer._tokenizer
        inner.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
        self.tokenizer = TokenizerWrapper(inner)
        size = len(inner)
        self.model = tiny_llama(vocab_size=size, layers=1)
        self.drafter = random_drafter(size, 32)
        self.folder = folder / "drafter"
        save_drafter(self.drafter, self.folder)
        self.engine = api.Engine(self.model, self.tokenizer, self.drafter)
        self.new = folder / "new"

    def calls(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Return functions by name, each with arguments."""
        pair = {"model": self.model, "tokenizer": self.tokenizer}
        text = {"max_tokens": FEW, "temp": 0.5, "seed": 1, "history": [[1, 2, 3]], "kv_bits": None}
        drafted = {"drafter": self.drafter, "sampler": None, "logits_processors": None}
        more = {"prompt_cache": None, "grammar": None, "prompt_progress_callback": None}
        sizes = {"beam_width": 2, "beam_length": 3, "tree_nodes": "auto", "prefill_step_size": 8}
        streamed = {"prompt": "Hi", **text, **more, **sizes}
        config = self.drafter.config.to_dict()
        return {
            "generate": (api.generate, {**pair, **drafted, **streamed}),
            "stream_generate": (api.stream_generate, {**pair, **drafted, **streamed}),
            "generate_batch": (api.generate_batch, {**pair, "prompts": ["Hi", [1, 2]],
                "drafter": self.drafter, "batch_size": 2, "max_tokens": FEW, "grammar": None}),
            "Engine": (api.Engine, {**pair, "drafter": "lookup", "memory": None}),
            "Engine.stream": (self.engine.stream, {**streamed, "shared": None}),
            "Engine.stream_batch": (self.engine.stream_batch,
                {"prompts": ["Hi"], "batch_size": 2, "max_tokens": FEW}),
            "Engine.masks": (self.engine.masks, {"grammar": api.Grammar.json_object()}),
            "Conversation": (api.Conversation,
                {"engine": self.engine, "system_prompt": "Hi", "template_options": {}}),
            "ask": (self._ask, {"text": "Hi", "max_tokens": FEW}),
            "Lookup": (api.Lookup, {"history": [[1, 2]]}),
            "DraftModel": (api.DraftModel, {**pair}),
            "Drafter": (api.Drafter, {"config": self.drafter.config}),
            "SpeculateAhead": (api.SpeculateAhead, {"drafter": self.drafter, "num_outcomes": 2}),
            "DrafterConfig": (api.DrafterConfig, {"vocab_size": 9, "hidden_size": 8, "exit_dim": 8,
                "num_draft_layers": 1, "draft_vocab_size": None, "rnn": True, "draft_top_k": None}),
            "from_dict": (lambda **values: api.DrafterConfig.from_dict(values), config),
            "from_any": (api.DrafterConfig.from_dict, {"values": config}),
            "Grammar": (api.Grammar, {"source": api.Grammar.json_object().source}),
            "json_schema": (api.Grammar.json_schema, {"schema": {"type": "object"}}),
            "regex": (api.Grammar.regex, {"pattern": "[a-z]+"}),
            "lark": (api.Grammar.lark, {"rules": 'start: "a"', "scale": 9}),
            "load_drafter": (api.load_drafter, {"path_or_repo": self.folder}),
            "load": (api.load, {"path_or_repo": None, "drafter": None, "tokenizer_config": {},
                "adapter_path": None, "group": None}),
            "save_drafter": (api.save_drafter,
                {"drafter": self.drafter, "folder": self.new, "extra_config": {"a": 1}}),
        }  # fmt: skip

    def _ask(self, **options: Any) -> Iterator[Any]:
        return api.Conversation(self.engine).ask(**options)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("yard"))


def spoil(chance: random.Random, arguments: Mapping[str, Any], yard: Yard) -> dict[str, Any]:
    """Replace, add or leave out some arguments."""
    spoiled = dict(arguments)
    layers = make_prompt_cache(yard.model)
    others = (yard.model, yard.tokenizer, yard.drafter, yard.engine, layers, [layers[0]] * 2)
    for _ in range(chance.randint(1, 2)):
        name = chance.choice([*arguments, "nonsense"])
        if chance.random() < 0.05:
            spoiled.pop(name, None)
            continue
        kinds = (VALUES, VALUES, FUNCTIONS, others)
        value = chance.choice(chance.choice(kinds))
        if name == "logits_processors":
            value = [chance.choice(FUNCTIONS)]
        elif name == "sampler":
            value = chance.choice((*FUNCTIONS, 5))
            spoiled.update(temp=None, seed=None)
        if name == "max_tokens" and type(value) is int:
            value = 0  # others are valid, and their texts long
        if name == "prompt_progress_callback" and callable(value):
            value = [value]  # errors of the user's own function are the user's
        spoiled[name] = value
    return spoiled


def read(found: Any) -> None:
    if isinstance(found, Iterator):
        list(islice(found, FEW))
        found.close()  # type: ignore[attr-defined]


def complaint(error: Exception) -> str | None:
    """Say what is bad about an error; None if nothing is."""
    text = str(error)
    if isinstance(error, TypeError) and not isinstance(error, api.RedrafterError):
        return None if any(words in text for words in SIGNATURE) else "another TypeError"
    if not isinstance(error, api.RedrafterError):
        return "an error of Python"
    if not text or "\n" in text or len(text) > MOST_CHARACTERS:
        return "not one line"
    return None


def test_any_value_ends_in_one_line(yard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls, bad, num_errors = yard.calls(), [], 0
    for name, (function, arguments) in calls.items():
        if name not in ("load", "DraftModel"):  # these succeed elsewhere, and take long
            read(function(**arguments))
    for number in range(NUM_CALLS):
        chance = random.Random(number)
        name = chance.choice(sorted(calls))
        function, arguments = calls[name]
        spoiled = spoil(chance, arguments, yard)
        try:
            read(function(**spoiled))
        except Exception as error:
            num_errors += 1
            if (reason := complaint(error)) is not None:
                given = {key: one for key, one in spoiled.items() if one is not arguments.get(key)}
                bad.append(f"{number} {name} {given!r:.200}: {reason}: {type(error)} {error}")
    assert not bad, "\n".join([f"{len(bad)} bad", *bad])
    assert num_errors > NUM_CALLS // 2


def test_known_odd_arguments(yard):
    one = {"model": yard.model, "tokenizer": yard.tokenizer, "max_tokens": FEW}
    with pytest.raises(TypeError, match="history"):
        api.generate_batch(prompts=["Hi"], history=[[1]], **one)
    with pytest.raises(api.RedrafterError, match="history must be a list"):
        api.Lookup(history=5)  # type: ignore[arg-type]
    with pytest.raises(api.RedrafterError, match="history token ids must be from 0 to"):
        api.generate(prompt="Hi", history=[[10**9]], **one)
    with pytest.raises(api.RedrafterError, match="drafter must be a network that drafts"):
        api.save_drafter(None, yard.new)  # type: ignore[arg-type]
    with pytest.raises(api.RedrafterError, match="config must be a mapping"):
        api.DrafterConfig.from_dict(5)  # type: ignore[arg-type]

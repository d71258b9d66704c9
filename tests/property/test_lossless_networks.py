"""Proposers of all kinds leave every text as stock mlx-lm has it, whatever they propose.

Draft models are the target itself, one of nearly its weights, of other weights, and a smaller one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from mlx_redrafter import DraftModel, Lookup, SpeculateAhead
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.engine import engine
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.assistant import load as load_assistant
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.draft_network import NetworkDrafting
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kv_drafting import _Levels
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.target.target import Target
from tests.helpers import equality
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.calls import at_call
from tests.helpers.equality import ids, stock_tokens, tokens
from tests.helpers.medusa import fitted_medusa, random_medusa, with_static_tree
from tests.helpers.models import random_drafter, tiny_llama, tiny_qwen3, wrapped_tokenizer
from tests.helpers.mtp import MIMO, TORCH_NAMES, family_config, module_tensors, tiny_mimo, write
from tests.helpers.published_heads import ASSISTANTS, assistant_tensors
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config

PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
TURNS = PROMPT, [60], [7, 8, 9]
NUM_TOKENS = 14
CHAIN: dict[str, Any] = {"beam_width": 1, "beam_length": 5}
TREE: dict[str, Any] = {"beam_width": 3, "beam_length": 5, "tree_nodes": 12}
BEAMS: dict[str, Any] = {"beam_width": 2, "beam_length": 4, "select": "beam"}
# Logit that is added to the text's own token, for drafts that the target accepts.
BONUS = 50.0
HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"version": 1},
    "EAGLE-3": {"version": 3, "draft_vocab_size": 70, "captured_layers": (0, 1, 1)},
    "windows": {"version": 3, "captured_layers": (0, 1, 2), "num_hidden_layers": 2,
        "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    "P-EAGLE": {"version": 3, "captured_layers": (0, 1, 1), "mask_token_id": 3, "max_length": 6,
        "own_embedding": True},
    "without fc": {"version": 3, "reads_hidden_state": True},
}  # fmt: skip


@cache
def target_of(name: str) -> nn.Module:
    if name == "llama":
        return tiny_llama(seed=4, vocab_size=VOCAB_SIZE)
    if name == "qwen3":
        return tiny_qwen3(seed=2, vocab_size=VOCAB_SIZE)
    if name.endswith("mimo"):
        return tiny_mimo({**MIMO, "tie_word_embeddings": name != "mimo"})
    return build(family_config(name) if name in FAMILIES else tiny_config(name))


def eagle(model: nn.Module, kind: str) -> Eagle:
    mx.random.seed(list(HEADS).index(kind))
    sizes = {"hidden_size": Target(model).hidden_size, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
    head = Eagle(EagleConfig(**sizes, **heads, **HEADS[kind]))
    mx.eval(head.parameters())
    return head


def block(model: nn.Module, link: str, **changes: Any) -> BlockNetwork:
    target = Target(model)
    config = block_config(target.vocab_size, target.hidden_size, **{**LINKS[link], **changes})
    return random_block(config, seed=len(link))


def medusa(model: nn.Module, tree: str) -> Medusa:
    """Heads that are right in a good part of the greedy text."""
    text = ids(stock_tokens(model, PROMPT, NUM_TOKENS))
    network = fitted_medusa(model, [*PROMPT, *text])
    return with_static_tree(network) if tree == "static" else network


def mtp(model: nn.Module, name: str) -> Any:
    tied = {"tie_word_embeddings": True} if name == "tied mimo" else {}
    config = {**family_config(name.removeprefix("tied ")), **tied}
    with TemporaryDirectory() as folder:
        return load_mtp(write(Path(folder), module_tensors(config), config))


def assistant(model: nn.Module, name: str) -> Any:
    with TemporaryDirectory() as folder:
        return load_assistant(write(Path(folder), assistant_tensors(name), ASSISTANTS[name]))


def similar(model: nn.Module) -> nn.Module:
    """The same llama with noise in its head: mostly right."""
    other: Any = tiny_llama(seed=4, vocab_size=VOCAB_SIZE)
    head = other["lm_head"]
    head.weight = head.weight + 0.3 * mx.random.normal(head.weight.shape, key=mx.random.key(1))
    mx.eval(head.weight)
    return other


TOKENIZER = wrapped_tokenizer(VOCAB_SIZE)
DRAFT_MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the target itself": lambda model: model,
    "a similar model": similar,
    "another model": lambda model: tiny_qwen3(seed=8, vocab_size=VOCAB_SIZE),
    "a smaller model": lambda model: tiny_llama(seed=9, vocab_size=VOCAB_SIZE, layers=1),
}
GUESTS = ("lookup", "recurrent", *DRAFT_MODELS)
# Kinds of which a text may accept no draft.
WRONG = "P-EAGLE", "another model", "a smaller model"
# Drafters that draft ahead.
AHEAD = ("recurrent", "some tokens", "the target itself", "another model")


def guest(model: nn.Module, name: str) -> Any:
    if name in DRAFT_MODELS:
        return DraftModel(DRAFT_MODELS[name](model), TOKENIZER)
    num_tokens = 40 if name == "some tokens" else None
    network = random_drafter(VOCAB_SIZE, 32, draft_vocab_size=num_tokens)
    return Lookup() if name == "lookup" else network


def ahead(model: nn.Module, name: str) -> SpeculateAhead:
    return SpeculateAhead(guest(model, name))


class Case(NamedTuple):
    """A target, one of the kinds of proposers that ``make`` makes, and shapes of drafts."""

    target: str
    kind: str
    make: Callable[[nn.Module, str], Any]
    shapes: Sequence[dict[str, Any]] = (CHAIN, TREE)


FAMILIES = ("nemotron_h", *TORCH_NAMES)
CASES = [
    # How much is drafted depends on the first shape, which times its steps.
    Case("llama", "EAGLE-3", eagle, ({}, CHAIN, TREE)),
    *(Case("llama", kind, eagle) for kind in HEADS if kind != "EAGLE-3"),
    *(Case("qwen3", kind, eagle) for kind in ("EAGLE-3", "windows")),
    *(Case("gemma2", kind, eagle) for kind in ("EAGLE-1", "P-EAGLE", "windows")),
    *(Case("llama", link, block) for link in LINKS),
    Case("qwen3", "DFlash 2", block),
    Case("qwen3_5", "vanilla", block),
    Case("gemma3_text", "DFlash", block),
    Case("qwen3_moe", "recurrent", block),
    *(
        Case(name, tree, medusa, ({}, CHAIN, TREE, BEAMS))
        for name in ("llama", "qwen3", "gemma2")
        for tree in ("dynamic", "static")
    ),
    *(Case(name, name, mtp, (TREE,)) for name in FAMILIES if name != "mimo"),
    *(Case(name, name, mtp, ({}, CHAIN, TREE)) for name in ("mimo", "tied mimo")),
    *(Case("gemma4_text", name, assistant, (CHAIN, TREE, BEAMS)) for name in ASSISTANTS),
    *(Case("gemma4", name, assistant, (TREE,)) for name in ASSISTANTS),
    *(Case("llama", name, guest, ({}, CHAIN, TREE)) for name in GUESTS),
    *(Case("llama", name, ahead, ({}, CHAIN, TREE, BEAMS)) for name in AHEAD),
]


def tip(patch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Make the drafts likely that followed the same token in some texts: many are accepted."""
    bonus = np.zeros((vocab_size, vocab_size), dtype=np.float32)
    for text in texts:
        for one, other in pairwise(text):
            bonus[one, other] = BONUS
    table, coming = mx.array(bonus), [*PROMPT, *texts[0][1:]]
    first, following = _Levels.first, _Levels.following
    logits, ahead = BlockNetwork.logits, list[int]()

    def to_rows(levels: Any, found: mx.array, before: mx.array) -> mx.array:
        ids = levels.to_token_ids(mx.arange(found.shape[-1]))
        tipped = found + table[before][..., ids]
        return tipped - mx.logsumexp(tipped, axis=-1, keepdims=True)

    def first_tipped(levels: Any) -> mx.array:
        roots = mx.concatenate([flight.root for _, flight in levels.group])
        return to_rows(levels, first(levels), roots)

    def following_tipped(levels: Any, beams: Any, tokens: mx.array, depth: int) -> mx.array:
        return to_rows(levels, following(levels, beams, tokens, depth), tokens)

    def note(network: BlockNetwork, drafting: Any, flight: Pass) -> None:
        ahead[:] = coming[flight.length + len(flight.rows) + 1 :]

    def scoring(network: BlockNetwork, outputs: mx.array, target: Target) -> mx.array:
        found = logits(network, outputs, target)
        for depth, token in enumerate(ahead[: len(found)]):
            found[depth, token] += BONUS * (depth % 3 < 2)  # some are wrong
        return found

    patch.setattr(_Levels, "first", first_tipped)
    patch.setattr(_Levels, "following", following_tipped)
    at_call(patch, BlockNetwork, "surround", note)
    patch.setattr(BlockNetwork, "logits", scoring)


@pytest.fixture(params=CASES, ids=lambda case: f"{case.target}, {case.kind}, {case.make.__name__}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_texts_are_those_of_plain_decoding(case, monkeypatch):
    model = target_of(case.target)
    network, accepted = case.make(model, case.kind), 0
    expected = stock_tokens(model, PROMPT, NUM_TOKENS)
    sampling = {"temp": 0.8, "seed": 11, "max_tokens": NUM_TOKENS}
    sampled = tokens(model, PROMPT, **sampling)
    texts = [PROMPT[-1:] + text for text in (ids(expected), sampled)]
    tip(monkeypatch, texts, Target(model).vocab_size)
    for shape in case.shapes:
        options = {"max_tokens": NUM_TOKENS, "prefill_step_size": 4, **shape}
        found = list(equality.stream(model, PROMPT, network, **options))
        equality.assert_same_tokens(expected, [one.token for one in found], shape)
        accepted += sum(one.from_draft for one in found)
        assert tokens(model, PROMPT, network, **sampling, **shape) == sampled
    assert tokens(model, PROMPT, network, couple=False, **sampling, **TREE) == sampled
    assert accepted > 0 or case.kind in WRONG, "nothing was accepted"


def test_turns_on_one_prompt_cache(case):
    """With the target's layers alone, and with those of the proposer after them."""
    model = target_of(case.target)
    network = case.make(model, case.kind)
    equality.assert_turns(model, network, TURNS, max_tokens=5, **CHAIN)
    networks = network.networks if network.num_layers else ()
    own = [layer for one in networks for layer in make_prompt_cache(one)]
    # Every turn of a network that reads pairs leaves out one of them.
    behind = 0 if case.make in (guest, ahead) else 1
    equality.assert_turns(model, network, TURNS, own, behind=behind, max_tokens=5, **TREE)


def test_files_of_one_prompt_cache(tmp_path):
    model, path = target_of("gemma3_text"), str(tmp_path / "cache.safetensors")
    network = block(model, "DFlash 2")
    stock, shared = make_prompt_cache(model), make_prompt_cache(model) + make_prompt_cache(network)
    for turn in TURNS:
        expected = ids(stock_tokens(model, turn, 9, prompt_cache=stock))
        options: dict[str, Any] = {"max_tokens": 9, "prompt_cache": shared, **TREE}
        assert tokens(model, turn, network, **options) == expected
        save_prompt_cache(path, shared)
        shared = load_prompt_cache(path)
    held = [layer.keys.shape[2] for layer in shared[-2:]]
    assert held[1] <= held[0], "a window keeps no more entries than the whole text has"


def test_long_texts_keep_windows_bounded():
    """Buffers of windowed layers drop what no window reaches, and the texts stay equal."""
    model = target_of("llama")
    network = block(model, "vanilla", windows=(6, 9), causal=(True, False))
    cache = make_prompt_cache(model) + make_prompt_cache(network)
    prompt = [token % VOCAB_SIZE for token in range(7, 440)]
    expected = ids(stock_tokens(model, prompt, 20))
    options: dict[str, Any] = {"max_tokens": 20, "prompt_cache": cache, **CHAIN}
    assert tokens(model, prompt, network, prefill_step_size=64, **options) == expected
    assert all(layer.keys.shape[2] <= 320 for layer in cache[-2:])


def test_the_policy_never_asks_for_more_than_the_heads_reach(monkeypatch):
    model, heads = target_of("llama"), random_medusa(VOCAB_SIZE, num_heads=2)
    asked: list[int] = []
    note = lambda drafting, flight, plan, noise: asked.append(plan.shape.length)  # noqa: E731
    at_call(monkeypatch, NetworkDrafting, "propose", note)
    monkeypatch.setattr(engine, "step_costs", step_costs)  # the real ones, whose plans are longer
    tokens(model, PROMPT, heads, max_tokens=60)
    assert len(asked) > 20
    assert max(asked) == 3
    with pytest.raises(ConfigError, match=r"beam_length must be an integer from 2 to 3 \(the root"):
        tokens(model, PROMPT, heads, beam_length=4)

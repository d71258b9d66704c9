"""Which drafters count as made for a model, and the memory that both need, estimated."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter import Lookup, load, stream_generate
from mlx_redrafter.checkpoint_files import shared_name
from mlx_redrafter.checkpoints import bundled, drafter_search, memory_check
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.cards import Card, read_card
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, read_table
from mlx_redrafter.checkpoints.identity import REPOSITORY, Identity, digest_tokens, plain_name
from mlx_redrafter.checkpoints.memory_check import TREE_TOKENS, Context, estimate_memory
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.errors import CheckpointError, ResourceError
from mlx_redrafter.model_store import find_stored, is_complete, repository_of, stored_models
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from tests.helpers.models import change_config
from tests.models.tiny_models import build, tiny_config

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)
KEYS = (
    "hidden_size vocab_size num_target_layers dflash_config target_layer_ids target "
    "transformer_layer_config aux_hidden_state_layer_ids speculators_config text_config"
).split()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, in a home without LM Studio."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def _cached(cache: Path, name: str, source: Path, **changes: object) -> Path:
    """Put a folder into the cache as a repository, with changes to its config."""
    home = cache / f"models--{name.replace('/', '--')}"
    folder = home / "snapshots" / "abc"
    shutil.copytree(source, folder)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    change_config(folder, **changes)
    return folder


def test_a_copy_is_the_same_model_and_a_similar_name_is_not():
    model = plain_name("Qwen/Qwen3-4B")
    for copy in "-4bit -8bit -MLX-4bit -bf16 -float32 -4bit-DWQ -mxfp4 -FP8 -mlx-8Bit-g32".split():
        assert plain_name(f"mlx-community/Qwen3-4B{copy}") == model
        for other in "4B-Base 4B-Instruct-2507 40B 4B-qat".split():
            assert plain_name(f"mlx-community/Qwen3-{other}{copy}") != model
    # Only a quantised copy has the name of its base model.
    base = ("Qwen/Qwen3-4B",)
    copy, tuned = Card(base_models=base, is_quantised=True), Card(base_models=base)
    assert Identity.of("me/small", {}, copy).is_named(*base)
    assert not Identity.of("me/abliterated", {}, tuned).is_named(*base)
    merged = Card(base_models=(*base, "other/model"), is_quantised=True)
    assert not Identity.of("me/merged", {}, merged).is_named(*base)


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(KEYS), JSON), st.dictionaries(st.sampled_from(KEYS), JSON))
def test_no_config_breaks_the_comparison(drafter, model):
    found = Identity(frozenset(), model).contradiction(drafter)
    assert found is None or isinstance(found, str)


CONTRADICTIONS: list[tuple[dict[str, object], str | None]] = [
    ({"hidden_size": 64}, "its hidden_size 64 is not the model's 32"),
    ({"vocab_size": 101}, "its vocab_size 101 is not the model's 100"),
    ({"transformer_layer_config": {"hidden_size": 8}}, "hidden_size 8"),
    ({"dflash_config": {"num_target_layers": 5}}, "a model of 5 layers, not of 4"),
    ({"dflash_config": {"target_layer_ids": [1, 5]}}, "reads layer 5"),
    ({"target": {"name": "org/other"}}, "it was made for org/other"),
    ({"target": {"name": "a folder"}}, None),
    ({"hidden_size": 32, "vocab_size": 90, "target_layer_ids": [0, 4]}, None),
]


def test_a_config_that_contradicts_the_model_is_named():
    sizes = {"hidden_size": 32, "vocab_size": 100, "num_hidden_layers": 4}
    for model in (sizes, {"text_config": sizes}):
        identity = Identity.of("org/model", model, Card())
        for config, reason in CONTRADICTIONS:
            found = identity.contradiction(config)
            assert found == reason or (reason or "nothing") in (found or "")


def test_the_table_is_in_order():
    table = read_table()
    assert len({line.drafter for line in table}) == len(table)
    targets = {line.target for line in table}
    assert len({plain_name(target) for target in targets}) == len(targets)
    for line in table:
        assert REPOSITORY.fullmatch(line.drafter), line
        assert line.method in drafter_search.METHODS, line
        assert line.source, line
        assert drafter_search.published_for(Identity.of(f"x/{line.target}-4bit", {}, Card()))
        assert not line.gain or line.gain.endswith(")"), "whose figure it is"


def test_stores_are_searched_for_complete_models(cache, tmp_path):
    target = find_bundled("target")
    folder = _cached(cache, "org/Model-4bit", target)
    studio = tmp_path / ".lmstudio" / "models" / "lmstudio" / "Other"
    shutil.copytree(target, studio)
    assert [model.name for model in stored_models()] == ["lmstudio/Other", "org/Model-4bit"]
    for name in ("model-4BIT", "org/Model-4bit", "Org/model-4bit"):
        assert find_stored(name, None) == folder
    assert (repository_of(folder), repository_of(studio)) == ("org/Model-4bit", "lmstudio/Other")
    # Cards and configs of drafters name the repository, by which drafters are found.
    assert shared_name(folder) == "org/Model-4bit"
    # Their folders may be links to another disk.
    for link, kept in ((studio, "one"), (cache / "models--org--Model-4bit", "two")):
        link.rename(tmp_path / kept)
        link.symlink_to(tmp_path / kept)
    assert [repository_of(model.folder) for model in stored_models()] == [
        model.name for model in stored_models()
    ]
    shutil.copytree(target, tmp_path / ".lmstudio" / "models" / "me" / "Model-4bit")
    with pytest.raises(CheckpointError, match="me/Model-4bit, org/Model-4bit; give one"):
        find_stored("Model-4bit", None)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert not is_complete(folder, None)
    assert is_complete(folder, ["config.json"])
    assert find_stored("org/Model-4bit", ["*.json", "model*.safetensors"]) is None


def test_the_tensors_of_a_stored_repository_tell_its_kind(cache, tmp_path):
    """EAGLE-1's published configs are those of a model."""
    sizes = dict.fromkeys(("hidden_size", "vocab_size", "intermediate_size"), 32)
    head = EagleConfig(1, **sizes, num_attention_heads=4, num_key_value_heads=2)
    save_drafter(Eagle(head), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text('{"model_type": "llama"}')
    _cached(cache, "org/Head", tmp_path / "head")
    assert [recognise(name)[0].NAME for name in ("org/Head", "head")] == ["EAGLE head"] * 2


def test_a_drafter_is_found_by_its_config_or_card_alone(cache):
    drafter = find_bundled("drafter")
    target = _cached(cache, "mlx-community/Tiny-Instruct-4bit", find_bundled("target"))
    search = DrafterSearch(Identity.of_folder(target))
    _cached(cache, "org/similar", drafter, target={"name": "org/Tiny"})
    by_card = _cached(cache, "org/by-card", drafter, target=None)
    (by_card / "README.md").write_text("---\nbase_model: org/Tiny\n---\n")
    assert search.stored() is None, "made for a model of a similar name"
    (by_card / "README.md").write_text("---\nbase_model: [org/Tiny-Instruct]\n---\n")
    found: Any = search.stored()
    assert (found.name, found.reason) == ("org/by-card", "its card names org/Tiny-Instruct")
    _cached(cache, "org/a-wide", drafter, target={"name": "org/Tiny-Instruct"}, hidden_size=64)
    _cached(cache, "org/by-config", drafter, target={"name": "org/Tiny-Instruct"})
    (by_card / "README.md").write_text("---\n[\n---\n")
    assert read_card(by_card) == Card(), "a damaged card"
    found = search.stored()
    assert found.name == "org/by-config"
    assert "org/a-wide is not for this model: its hidden_size 64" in search.skipped[-1]


def test_a_bundled_drafter_is_for_its_model_alone(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "DRAFTERS", tmp_path / "drafters")
    drafter, table = tmp_path / "drafters" / "tiny", {"model": {"vocab": {"a": 0, "b": 1}}}
    shutil.copytree(find_bundled("drafter"), drafter)

    def model(name: str, **tokenizer: object) -> str | None:
        """Put a model with these tokens into the cache, and search for its drafter."""
        folder = _cached(cache, name, find_bundled("target"))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer or table))
        found = DrafterSearch(Identity.of_folder(folder)).stored()
        return None if found is None else found.path

    def made_for(tokens: str | None) -> None:
        change_config(drafter, target={"name": "org/Tiny-Instruct", "tokens": tokens})

    made_for("none")
    assert model("org/Tiny-Instruct") is None, "a model of this name with other tokens"
    folder = find_stored("org/Tiny-Instruct", None)
    made_for(digest_tokens(folder))
    assert model("mlx-community/Tiny-Instruct") == str(drafter)
    assert model("mlx-community/Tiny-Instruct-4bit") == str(drafter)
    # The same tokens, stored by another program.
    added = [{"id": 1, "content": "b"}]
    parted = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
    assert model("me/Tiny-Instruct-8bit", **parted) == str(drafter)
    other = {"model": {"vocab": {"a": 1, "b": 0}}}
    assert model("me/Tiny-Instruct-MLX-4bit", **other) is None
    for name in ("org/Tiny", "org/Tiny-Instruct-2", "me/Tiny-Instruct-tuned"):
        assert model(name) is None
    plain = find_stored("org/Tiny", None)
    link = tmp_path / "Tiny-Instruct"
    link.symlink_to(plain)
    found = DrafterSearch(Identity.of_folder(link)).stored()
    assert found.path == str(drafter), "a link has a name of its own"


def test_the_smallest_model_with_the_same_tokens_may_draft(cache):
    target = _cached(cache, "org/large", find_bundled("target"))
    search = DrafterSearch(Identity.of_folder(target))
    draft = _cached(cache, "org/small", find_bundled("target"))
    assert search.draft_model() is None, "as large as the target"
    os.truncate(target / "model.safetensors", 10**8)
    found: Any = search.draft_model()
    assert found.path == str(draft)
    (draft / "tokenizer.json").write_bytes(b"other")
    assert search.draft_model() is None


def test_a_copy_of_the_model_may_draft_and_another_model_may_not(cache):
    target = _cached(cache, "org/Tiny-Instruct", find_bundled("target"))
    os.truncate(target / "model.safetensors", 10**8)
    search, four = DrafterSearch(Identity.of_folder(target)), {"quantization": {"bits": 4}}
    for name, changes in (
        ("org/Tiny-4bit", {}),
        ("org/Tiny-Instruct-tuned-4bit", {}),
        ("me/Tiny-Instruct-4bit", {"num_hidden_layers": 1}),
        ("you/Tiny-Instruct-4bit", {"hidden_size": 64}),
        ("mlx/Tiny-Instruct-4bit", {"model_type": "unheard-of"}),
    ):
        _cached(cache, name, find_bundled("target"), **four, **changes)
    foreign = _cached(cache, "org/Tiny-Instruct-MLX-4bit", find_bundled("target"), **four)
    (foreign / "tokenizer.json").write_bytes(b"other")
    assert list(search.copies()) == []
    copy = _cached(cache, "mlx/Tiny-Instruct-8bit", find_bundled("target"), **four)
    beside = shutil.copytree(copy, target.parent / "Tiny-Instruct-4bit")
    assert [one.path for one in search.copies()] == [str(copy), str(beside)]
    assert list(DrafterSearch(Identity.of_folder(copy)).copies()) == [], "as large as the copy"


SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512,
    "num_attention_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 8192, "sliding_window": 128, "moe_intermediate_size": 128,
}  # fmt: skip
# Tokens of a chunk of the prompt.
CHUNK = 256


def _write(folder: Path, model_type: str, bits: int | None) -> nn.Module:
    config: dict[str, Any] = tiny_config(model_type)
    config["torch_dtype"] = "float32"
    for values in (config, config.get("text_config", {})):
        values |= {key: size for key, size in SIZES.items() if key in values}
    model = build(config)
    if bits is not None:
        nn.quantize(model, 64, bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    mx.eval(model.parameters())
    return model


def _measure(model: nn.Module, tokens: int) -> int:
    """Peak memory of a prompt in chunks, of a step and of a tree's scores, with the weights."""
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    prompt = mx.zeros((1, tokens), mx.int32)
    for start in range(0, tokens - 1, CHUNK):
        model(prompt[:, start : min(start + CHUNK, tokens - 1)], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    mx.eval(model(mx.array([[1]]), cache=cache))
    logits = model(mx.zeros((1, TREE_TOKENS), mx.int32), cache=cache).astype(mx.float32)
    mx.eval(mx.argsort(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1))
    return weights + mx.get_peak_memory() - before


@pytest.mark.parametrize(
    ("model_type", "bits", "lengths"),
    [
        ("llama", None, (200, 700)),
        ("llama", 4, (200,)),
        ("gemma3_text", None, (700,)),
        ("qwen3_moe", None, (200,)),
        ("qwen3_5", None, (200,)),
        ("starcoder2", None, (200,)),
    ],
)
def test_the_estimate_is_the_measured_peak(tmp_path, model_type, bits, lengths):
    model = _write(tmp_path, model_type, bits)
    for tokens in lengths:
        estimated = estimate_memory(tmp_path, None, Context(tokens, CHUNK))
        measured = _measure(model, tokens)
        assert 0.95 <= estimated.total / measured <= 1.1, (tokens, estimated, measured)


def test_a_config_may_leave_out_the_size_of_the_vocabulary(tmp_path):
    _write(tmp_path, "starcoder2", None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vocab_size"]  # mlx-lm has a default
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert estimate_memory(tmp_path, None, Context(200, CHUNK)).total > 0


@pytest.mark.parametrize("has_drafter", [False, True])
def test_the_estimate_is_the_peak_of_the_engine(has_drafter):
    target, drafter = find_bundled("target"), find_bundled("drafter") if has_drafter else None
    estimated = estimate_memory(target, drafter, Context(132)).total
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, tokenizer, proposer = load(target, drafter, tune=False)
    shape = {"beam_width": 4, "beam_length": 5, "tree_nodes": 16} if has_drafter else {}
    *_, _ = stream_generate(
        model, tokenizer, list(range(5, 105)), drafter=proposer or Lookup(), max_tokens=32, **shape
    )
    measured = mx.get_peak_memory() - before
    assert 0.95 <= estimated / measured <= 1.1, (estimated, measured)


@pytest.mark.parametrize("model_type", ["falcon_h1", "llama"])
def test_caches_have_the_size_of_those_of_mlx_lm(tmp_path, model_type):
    model = _write(tmp_path, model_type, None)
    caches = make_prompt_cache(model)
    for _ in range(2):
        model(mx.zeros((1, 256), mx.int32), cache=caches)
    parts = [part for one in caches for part in getattr(one, "caches", [one])]
    states = [(one.keys, one.values) if hasattr(one, "keys") else one.state for one in parts]
    expected = sum(one.nbytes for _, one in tree_flatten(states) if isinstance(one, mx.array))
    assert memory_check.cache_bytes(tmp_path, Context(512, CHUNK)) == expected


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_layers_of_an_adapter_grow_as_they_are_fused(tmp_path, model_type):
    model = _write(tmp_path, model_type, 4)
    before = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    linear_to_lora_layers(model, 2, {"rank": 3, "scale": 1.0, "dropout": 0.0})
    adapter = {name: array for name, array in tree_flatten(model.parameters()) if "lora_" in name}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapter)
    fused = [(name, one.fuse(True)) for name, one in model.named_modules() if hasattr(one, "fuse")]
    model.update_modules(tree_unflatten(fused))
    after = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert 0.9 <= memory_check.fused_growth(tmp_path, tmp_path) / (after - before) <= 1.1


def test_a_model_that_does_not_fit_is_refused_with_what_would(tmp_path, monkeypatch):
    _write(tmp_path, "llama", None)
    needed = estimate_memory(tmp_path, tmp_path, Context(8192, CHUNK))
    # The work would be measured again, on a machine that may be busy.
    monkeypatch.setattr(memory_check, "estimate_memory", lambda *_: needed)
    monkeypatch.setattr(memory_check, "read_total_memory", lambda: needed.total)
    assert memory_check.check_memory(tmp_path, tmp_path, Context(8192, CHUNK)) is None
    limit = needed.weights + needed.cache // 2 + needed.work
    monkeypatch.setattr(memory_check, "read_total_memory", lambda: limit)
    parts = ["K/V entries of 8,192 tokens", "--drafter lookup with --kv-bits 8"]
    parts += ["--drafter lookup with a context of 4,096 tokens", "a copy of the model in 8 bits"]
    with pytest.raises(ResourceError) as refused:
        memory_check.check_memory(tmp_path, tmp_path, Context(8192, CHUNK))
    assert [part for part in [*parts, "\n"] if part in str(refused.value)] == parts

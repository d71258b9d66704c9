"""Which drafters count as made for a model, by names, configs, cards and sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter.checkpoints import bundled
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.cards import Card, read_card
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch
from mlx_redrafter.checkpoints.identity import REPOSITORY, Identity, plain_name
from mlx_redrafter.checkpoints.published_drafters import METHODS, published_for, read_table
from mlx_redrafter.checkpoints.token_table import digest_tokens
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.model_store import find_stored, is_complete, repository_of, stored_models

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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_copy_is_the_same_model_and_a_similar_name_is_not() -> None:
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
def test_no_config_breaks_the_comparison(
    drafter: dict[str, object], model: dict[str, object]
) -> None:
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


def test_a_config_that_contradicts_the_model_is_named() -> None:
    sizes = {"hidden_size": 32, "vocab_size": 100, "num_hidden_layers": 4}
    for model in (sizes, {"text_config": sizes}):
        identity = Identity.of("org/model", model, Card())
        for config, reason in CONTRADICTIONS:
            found = identity.contradiction(config)
            assert found == reason or (reason or "nothing") in (found or "")


def test_the_table_is_in_order() -> None:
    table = read_table()
    assert len({line.drafter for line in table}) == len(table)
    targets = {line.target for line in table}
    assert len({plain_name(target) for target in targets}) == len(targets)
    for line in table:
        assert REPOSITORY.fullmatch(line.drafter), line
        assert line.method in METHODS, line
        assert line.source, line
        assert published_for(Identity.of(f"x/{line.target}-4bit", {}, Card()), table)
        assert not line.gain or line.gain.endswith(")"), "whose figure it is"


def test_stores_are_searched_for_complete_models(cache: Path, tmp_path: Path) -> None:
    target = find_bundled("target")
    folder = _cached(cache, "org/Model-4bit", target)
    studio = tmp_path / ".lmstudio" / "models" / "lmstudio" / "Other"
    shutil.copytree(target, studio)
    assert [model.name for model in stored_models()] == ["lmstudio/Other", "org/Model-4bit"]
    assert find_stored("model-4BIT", None) == find_stored("org/Model-4bit", None) == folder
    assert (repository_of(folder), repository_of(studio)) == ("org/Model-4bit", "lmstudio/Other")
    shutil.copytree(target, tmp_path / ".lmstudio" / "models" / "me" / "Model-4bit")
    with pytest.raises(CheckpointError, match="me/Model-4bit, org/Model-4bit; give one"):
        find_stored("Model-4bit", None)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert not is_complete(folder, None)
    assert is_complete(folder, ["config.json"])
    assert find_stored("org/Model-4bit", ["*.json", "model*.safetensors"]) is None


def test_a_drafter_is_found_by_its_config_or_card_alone(cache: Path) -> None:
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


def test_a_bundled_drafter_is_for_its_model_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        config = json.loads((drafter / "config.json").read_text())
        config["target"] = {"name": "org/Tiny-Instruct", "tokens": tokens}
        (drafter / "config.json").write_text(json.dumps(config))

    made_for("none")
    assert model("org/Tiny-Instruct") is None, "a model of this name with other tokens"
    folder = find_stored("org/Tiny-Instruct", None)
    assert folder is not None
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


def test_the_smallest_model_with_the_same_tokens_may_draft(cache: Path) -> None:
    target = _cached(cache, "org/large", find_bundled("target"))
    search = DrafterSearch(Identity.of_folder(target))
    draft = _cached(cache, "org/small", find_bundled("target"))
    assert search.draft_model() is None, "as large as the target"
    with (target / "model.safetensors").open("r+b") as file:
        file.truncate(10**8)
    found: Any = search.draft_model()
    assert found.path == str(draft)
    (draft / "tokenizer.model").write_bytes(b"other")
    assert search.draft_model() is None


def test_a_copy_of_the_model_may_draft_and_another_model_may_not(cache: Path) -> None:
    target = _cached(cache, "org/Tiny-Instruct", find_bundled("target"))
    with (target / "model.safetensors").open("r+b") as file:
        file.truncate(10**8)
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
    (foreign / "tokenizer.model").write_bytes(b"other")
    assert list(search.copies()) == []
    copy = _cached(cache, "mlx/Tiny-Instruct-8bit", find_bundled("target"), **four)
    beside = shutil.copytree(copy, target.parent / "Tiny-Instruct-4bit")
    assert [one.path for one in search.copies()] == [str(copy), str(beside)]
    assert list(DrafterSearch(Identity.of_folder(copy)).copies()) == [], "as large as the copy"

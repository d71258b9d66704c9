"""MTP modules and block drafters through the converter: they stay what was published."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.checkpoint_files import named_parameters, read_config
from mlx_redrafter.checkpoints.bundled import bundled_drafters
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.along_text import predict
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.families import FAMILIES
from mlx_redrafter.target.target import Target
from tests.convert import handmade
from tests.golden.block_layouts import LAYOUTS, tensors
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import change_config, layer_inputs, tiny_llama
from tests.helpers.mtp import MIMO_PREFIX, family_config, module_tensors, write
from tests.unit.proposers.test_mtp import BAD_TENSORS, changed, own_folder

MODULE = module_tensors()


def convert(source: Path | str, out: Path, **options: Any) -> Any:
    return handmade.convert(source, out, **{"dtype": "float32", **options})


def published(folder: Path, model_type: str = "mimo") -> Path:
    """A folder with a config and the tensors of a module alone."""
    config = family_config(model_type)
    return write(folder, module_tensors(config), config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_converted_module_is_the_published_one(model_type, tmp_path):
    source = published(tmp_path / "source", model_type)
    expected = load_mtp(source)
    conversion = convert(source, tmp_path / "out")
    converted = load_mtp(tmp_path / "out")
    assert conversion.config == converted.config == expected.config
    assert_same_weights(converted, expected)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_quantised_modules_load(model_type, tmp_path):
    source = published(tmp_path / "source", model_type)
    convert(source, tmp_path / "out", dtype="bfloat16", quantize=True, q_group_size=32)
    assert read_config(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 4}
    module = load_mtp(tmp_path / "out")
    assert module.join.bits == module.block.mlp.switch_mlp.up_proj.bits == 4
    assert "scales" not in module.block.mlp.gate
    dtypes = {name: tensor.dtype for name, tensor in named_parameters(module).items()}
    assert dtypes["norm.weight"] == mx.bfloat16
    assert dtypes.get("block.mlp.gate.e_score_correction_bias", mx.float32) == mx.float32
    row = mx.ones((1, module.config.hidden_size))
    assert mx.all(mx.isfinite(module(row, row, module.make_cache()))).item()
    with pytest.raises(CheckpointError, match="not quantised"):
        convert(tmp_path / "out", tmp_path / "again")


def test_out_of_a_models_own_files(stories, tmp_path, monkeypatch, cli):
    monkeypatch.setattr("mlx_redrafter.convert.selftest.TOKENS_PER_PROMPT", 8)
    folder, out = own_folder(stories, tmp_path / "own", MODULE), tmp_path / "out"
    assert inspect_checkpoint(folder).kind == "an MTP module of a model of type 'mimo', for 'own'"
    assert set(inspect_checkpoint(folder).source.tensors) == set(MODULE)
    result = cli("convert", folder, out, "--dtype", "float32")
    assert "MTP module of a model of type mimo, hidden_size 32, float32" in result.out
    assert read_config(out)["conversion"]["target"] == "own"
    conversion = convert(folder, out, target=folder)
    assert conversion.provenance["self_test"]["positions"] == 32
    assert conversion.provenance["self_test"]["acceptance"] < 0.2
    assert "probably trained for another model" in conversion.warnings[0]
    kind = "an MTP module of a model of type 'mimo', written by this converter, for 'own'"
    assert inspect_checkpoint(out).kind == kind
    shown = cli("convert", out).out
    assert kind in " ".join(shown.split())
    assert "vocab_size: 512" in shown
    assert "--drafter FOLDER" in (out / "README.md").read_text()
    assert_same_weights(load_mtp(out), load_mtp(folder))
    with pytest.raises(CheckpointError, match="hidden_size 32 does not match the target's 64"):
        convert(out, tmp_path / "other", target=stories.folder)
    stated = read_config(out)["conversion"]
    change_config(out, conversion={**stated, "target": "a/b\nlicense: mit"})
    convert(out, tmp_path / "other")
    assert "license" not in (tmp_path / "other" / "README.md").read_text()


def test_of_a_repository_the_files_of_the_module_are_fetched(tmp_path, monkeypatch):
    files = {name: f"model-{i % 2:05}.safetensors" for i, name in enumerate(MODULE)}
    folder, asked = write(tmp_path / "cache", {}), list[list[str]]()
    (folder / "model.safetensors").unlink()

    def name_shards(names: dict[str, str]) -> None:
        index = {"weight_map": {**names, "lm_head.weight": "model-00009.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def download(repo: str, patterns: list[str], *_: object) -> Path:
        asked.append(patterns)
        for file in set(files.values()) & set(patterns):
            shard = {n: t for n, t in MODULE.items() if files[n] == file}
            mx.save_safetensors(str(folder / file), shard)
        return folder

    monkeypatch.setattr("mlx_redrafter.hub.fetch", download)
    name_shards(files)
    shards = ["model-00000.safetensors", "model-00001.safetensors"]
    assert load_mtp("org/model").config.vocab_size == 64
    assert asked[1:] == [shards]
    convert("org/model", tmp_path / "out")
    patterns = {pattern for one in asked for pattern in one}
    assert patterns == {"config.json", "model.safetensors.index.json", *shards}
    assert read_config(tmp_path / "out")["conversion"]["target"] == "org/model"
    assert load_mtp(tmp_path / "out").config.vocab_size == 64
    # The config names a module that the shards lack: nothing else is fetched to find out.
    asked.clear()
    for file in shards:
        (folder / file).unlink()
    for names, message in (
        ({}, r"no tensors model\.mtp_layers\.0\.\*"),
        ({MIMO_PREFIX + "input_proj.weight": "../x.safetensors"}, "name of a safetensors file"),
    ):
        name_shards(names)
        with pytest.raises(CheckpointError, match=message):
            load_mtp("org/model")
        with pytest.raises(CheckpointError, match=message):
            convert("org/model", tmp_path / "none")
    assert not any("safetensors" in pattern for one in asked for pattern in one if "*" in pattern)


BAD: list[tuple[Mapping[str, mx.array], dict[str, Any], type[Exception], str]] = [
    *((given, {}, CheckpointError, message) for given, message in BAD_TENSORS),
    (changed("final_layernorm.weight", mx.full((32, ), 1e6)), {"dtype": "float16"},
        NonFiniteError, r"model\.mtp_layers\.0\.final_layernorm\.weight; .* if float16 overflowed"),
    (MODULE, {"rnn_activation": "silu"}, ConfigError, "is not for an MTP module"),
    (MODULE, {"tree": "dynamic"}, ConfigError, "--tree is not for an MTP module"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[3])
def test_bad_sources_are_refused(tmp_path, case):
    given, options, kind, message = case
    source = write(tmp_path / "source", given)
    with pytest.raises(kind, match=message):
        convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    if kind is CheckpointError:
        inspection = inspect_checkpoint(source)
        assert inspection.config is None
        assert inspection.kind == "an MTP module that cannot be converted"


def test_the_head_computes_in_its_own_dtype(tmp_path):
    """A float16 module in front of a bfloat16 head: nothing of the head is cast."""
    convert(published(tmp_path / "source"), tmp_path / "out", dtype="float16")
    module, model = load_mtp(tmp_path / "out"), tiny_llama()
    model.set_dtype(mx.bfloat16)
    row = mx.ones((1, 32))
    outputs = module(row, row, module.make_cache())
    assert module.logits(outputs, Target(model)).dtype == mx.bfloat16


# Block drafters


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_drafter_is_the_published_one(name, tmp_path):
    source = write(tmp_path / "source", tensors(LAYOUTS[name]), LAYOUTS[name].config)
    expected = load_block(source)
    conversion = convert(source, tmp_path / "out")
    converted = load_block(tmp_path / "out")
    assert conversion.config == converted.config == expected.config
    assert_same_weights(converted, expected)
    kind = f"a {expected.config.name} drafter, "
    packaging = re.sub(" .*", "", name).replace("NVIDIA", "DeepSpec")
    assert inspect_checkpoint(source).kind == f"{kind}as {packaging} writes it"
    assert inspect_checkpoint(tmp_path / "out").kind == f"{kind}written by this package"


def test_a_block_drafter_may_be_in_a_file_of_torch(tmp_path):
    layout = next(iter(LAYOUTS.values()))
    source = write(tmp_path / "source", tensors(layout), layout.config)
    expected = load_block(source)
    (source / "model.safetensors").unlink()
    values = {name: np.array(one) for name, one in tensors(layout).items()}
    handmade.write(source, values, layout.config, "pytorch_model.bin")
    convert(source, tmp_path / "out")
    assert_same_weights(load_block(tmp_path / "out"), expected)


@pytest.mark.parametrize("link", LINKS)
def test_small_layers_are_never_quantised(link, tmp_path):
    sizes = {**LINKS[link], "rank": 32} if LINKS[link].get("rank") else LINKS[link]
    save_drafter(random_block(block_config(97, 32, has_confidence=True, **sizes)), tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", quantize=True, q_bits=8, q_group_size=32)
    assert read_config(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 8}
    network = load_block(tmp_path / "out")
    assert network.layers[0].self_attn.q_proj.bits == 8
    small = [name for name in named_parameters(network) if name.endswith("scales")]
    assert not [n for n in small if "conv" in n or "selector" in n or "confidence" in n]


def test_inspection_describes_block_drafters(tmp_path, cli):
    layout = next(iter(LAYOUTS.values()))
    source = write(tmp_path / "source", tensors(layout), layout.config)
    assert "mask_token_id" in cli("convert", source).out
    change_config(source, num_hidden_layers=7)
    assert "cannot be converted" in inspect_checkpoint(source).kind


def test_the_entry_that_the_target_accepts_is_found(tmp_path, monkeypatch, stories):
    """Read a config that names the wrong one: texts stay right, but few drafts are accepted."""
    network = random_block(block_config(512, 64, captured_layers=(1, 2)))
    target = Target(stories.model)
    target.modules.watch((0, 1, 2, 3))

    def decode(found: Target, tokenizer: object, layers: Sequence[int]) -> list[ReadSequence]:
        """Make a text whose next tokens are the first drafts of the network's own entry."""
        tokens = mx.random.randint(0, 512, (60,), key=mx.random.key(1))
        states = layer_inputs(target, tokens[:-1], layers)
        ids = mx.random.randint(0, 512, (50, 4), key=mx.random.key(2))
        text = ReadSequence(tokens, 10, states, ids, mx.zeros((50, 4)))
        own = text._replace(states=layer_inputs(target, tokens[:-1], (1, 2)))
        best = mx.argmax(predict(network, target, own)[0].logits, axis=-1)
        ids[1:, 0] = best
        return [text]

    monkeypatch.setattr("mlx_redrafter.convert.selftest.decode_all", decode)
    save_drafter(network, tmp_path / "right")
    wrong = replace(network.config, first_slot=1)
    (tmp_path / "wrong").mkdir()
    save_drafter(random_block(wrong), tmp_path / "wrong")
    for name in ("right", "wrong"):
        conversion = convert(tmp_path / name, tmp_path / f"{name}-out", target=stories.folder)
        assert conversion.config.first_slot == 0
        assert conversion.config.depth_scales is not None
        assert conversion.provenance["self_test"]["acceptance"] > 0.9
        (note,) = conversion.provenance["notes"]
        tried = "as it says", "entry [01] first", "earlier layers", "later layers"
        shares = ", ".join(rf"{one} \d+%" for one in (*tried, "neighbours rotated"))
        assert re.search(rf"{shares}; used (as it says|entry 0 first)$", note)


def test_a_drafter_of_the_package_is_described_by_its_name(cli):
    assert "quantised already" in cli("convert", bundled_drafters()[0].name).out

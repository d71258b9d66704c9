"""MTP modules through the converter: what comes out drafts as the published one does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import generate, load
from mlx_redrafter.checkpoint_files import named_parameters, read_config
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.families import FAMILIES
from mlx_redrafter.target.target import Target
from tests.conftest import Trained
from tests.helpers.cli import run
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import tiny_llama
from tests.helpers.mtp import MIMO_PREFIX, family_config, module_tensors, write
from tests.unit.proposers.test_mtp import BAD_TENSORS, changed, own_folder

MODULE = module_tensors()


def convert(source: Path | str, out: Path, **options: Any) -> Any:
    return convert_drafter(source, out, ConversionOptions(**{"dtype": "float32", **options}))


def published(folder: Path, model_type: str = "mimo") -> Path:
    """A folder with a config and the tensors of a module alone."""
    config = family_config(model_type)
    return write(folder, module_tensors(config), config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_converted_module_is_the_published_one(model_type: str, tmp_path: Path) -> None:
    source = published(tmp_path / "source", model_type)
    expected = load_mtp(source)
    conversion = convert(source, tmp_path / "out")
    assert conversion.config == expected.config
    assert recognise(tmp_path / "out")[0].NAME == "MTP module"
    converted = load_mtp(tmp_path / "out")
    assert_same_weights(converted, expected)
    rows = mx.random.normal((2, 5, expected.config.hidden_size), key=mx.random.key(1))
    outputs = [net(rows[0], rows[1], net.make_cache()) for net in (converted, expected)]
    assert mx.array_equal(*outputs).item()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_quantised_modules_load(model_type: str, tmp_path: Path) -> None:
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


def test_out_of_a_models_own_files(
    stories: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mlx_redrafter.convert.selftest.TOKENS_PER_PROMPT", 8)
    folder, out = own_folder(stories, tmp_path / "own", MODULE), tmp_path / "out"
    assert inspect_checkpoint(folder).kind == "an MTP module of a model of type 'mimo', for 'own'"
    assert set(inspect_checkpoint(folder).source.tensors) == set(MODULE)
    result = run(capsys, "convert", folder, out, "--dtype", "float32")
    assert "MTP module of a model of type mimo, hidden_size 32, float32" in result.out
    assert read_config(out)["conversion"]["target"] == "own"
    conversion = convert(folder, out, target=folder)
    assert conversion.provenance["self_test"]["positions"] == 32
    assert conversion.provenance["self_test"]["acceptance"] < 0.2
    assert "probably trained for another model" in conversion.warnings[0]
    kind = "an MTP module of a model of type 'mimo', written by this converter, for 'own'"
    assert inspect_checkpoint(out).kind == kind
    shown = run(capsys, "convert", out).out
    assert kind in " ".join(shown.split())
    assert "vocab_size: 512" in shown
    assert "--drafter FOLDER" in (out / "README.md").read_text()
    model, tokenizer, module = load(folder, drafter=out)
    options: dict[str, Any] = {"max_tokens": 20, "beam_width": 2}
    plain, drafted = (
        generate(model, tokenizer, "Lily", drafter=one, **options) for one in (None, module)
    )
    assert drafted == plain
    with pytest.raises(CheckpointError, match="hidden_size 32 does not match the target's 64"):
        convert(out, tmp_path / "other", target=stories.folder)
    values = read_config(out)
    values["conversion"]["target"] = "a/b\nlicense: mit"
    (out / "config.json").write_text(json.dumps(values))
    convert(out, tmp_path / "other")
    assert "license" not in (tmp_path / "other" / "README.md").read_text()


def test_of_a_repository_the_files_of_the_module_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: f"model-{i % 2:05}.safetensors" for i, name in enumerate(MODULE)}
    folder, asked = write(tmp_path / "cache", {}), list[list[str]]()
    (folder / "model.safetensors").unlink()

    def name_shards(names: dict[str, str]) -> None:
        index = {"weight_map": {**names, "lm_head.weight": "model-00009.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def download(repo: str, patterns: list[str], *_: object) -> Path:
        asked.append(patterns)
        for file in set(files.values()) & set(patterns):
            tensors = {n: t for n, t in MODULE.items() if files[n] == file}
            mx.save_safetensors(str(folder / file), tensors)
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
    *((tensors, {}, CheckpointError, message) for tensors, message in BAD_TENSORS),
    (changed("final_layernorm.weight", mx.full((32, ), 1e6)), {"dtype": "float16"},
        NonFiniteError, r"model\.mtp_layers\.0\.final_layernorm\.weight; .* if float16 overflowed"),
    (MODULE, {"rnn_activation": "silu"}, ConfigError, "is not for an MTP module"),
    (MODULE, {"tree": "dynamic"}, ConfigError, "--tree is not for an MTP module"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[3])
def test_bad_sources_are_refused(tmp_path: Path, case: Any) -> None:
    tensors, options, kind, message = case
    source = write(tmp_path / "source", tensors)
    with pytest.raises(kind, match=message):
        convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    if kind is CheckpointError:
        inspection = inspect_checkpoint(source)
        assert inspection.config is None
        assert inspection.kind == "an MTP module that cannot be converted"


def test_the_head_computes_in_its_own_dtype(tmp_path: Path) -> None:
    """A float16 module in front of a bfloat16 head: nothing of the head is cast."""
    convert(published(tmp_path / "source"), tmp_path / "out", dtype="float16")
    module, model = load_mtp(tmp_path / "out"), tiny_llama()
    model.set_dtype(mx.bfloat16)
    row = mx.ones((1, 32))
    outputs = module(row, row, module.make_cache())
    assert module.logits(outputs, Target(model)).dtype == mx.bfloat16

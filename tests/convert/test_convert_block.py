"""Block drafters through the converter, which tries the layouts that a config may mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoint_files import named_parameters, read_config
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions, Quantization
from mlx_redrafter.convert.inspection import inspect_checkpoint
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block import load as load_block
from tests.golden.block_layouts import LAYOUTS, Layout, backbone, tensors, zlab
from tests.helpers.models import fast_tokenizer, tiny_llama

VOCAB = 264


def write_drafter(folder: Path, layout: Layout) -> Path:
    folder.mkdir()
    arrays = {name: mx.array(one) for name, one in tensors(layout).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(layout.config))
    return folder


def silence(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Let layers add nothing, so that an output depends on its own token alone."""
    ends = ("o_proj.weight", "down_proj.weight")
    return {name: one * (not name.endswith(ends)) for name, one in arrays.items()}


def write_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a target whose next token depends on the newest alone, and a drafter that knows it.

    The drafter predicts at the root's entry, and its config says that it does so behind the root.
    """
    model: Any = tiny_llama(vocab_size=VOCAB, layers=4)
    target = folder / "target"
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), silence(named_parameters(model)))
    (target / "config.json").write_text(json.dumps({**vars(model.args), "eos_token_id": 0}))
    fast_tokenizer()._tokenizer.save_pretrained(target)
    layout = Layout({**zlab(), "vocab_size": VOCAB, **changes}, backbone(), ())
    drafter = write_drafter(folder / "drafter", layout)
    arrays = silence(mx.load(str(drafter / "model.safetensors")))
    arrays["norm.weight"] = mx.ones_like(arrays["norm.weight"])
    mx.save_safetensors(str(drafter / "model.safetensors"), arrays)
    return target, drafter


@pytest.mark.parametrize(
    "name", ["incoai", "Qwen3.5", "DeepSpec Gemma 4", "speculators DSpark gated"]
)
def test_a_converted_drafter_is_the_published_one(name: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source", LAYOUTS[name])
    published = load_block(source)
    conversion = convert_drafter(source, tmp_path / "out", ConversionOptions(dtype="float32"))
    assert conversion.config == published.config
    converted = load_block(tmp_path / "out")
    found, expected = named_parameters(converted), named_parameters(published)
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[key], expected[key]).item() for key in found)
    assert read_config(tmp_path / "out")[PROVENANCE_KEY]["sha256"]
    assert published.config.name in inspect_checkpoint(source).kind


def test_quantised_drafters_load_and_keep_their_small_layers(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source", LAYOUTS["incoai"])
    options = ConversionOptions(quantization=Quantization(8, 32))
    convert_drafter(source, tmp_path / "out", options)
    network = load_block(tmp_path / "out")
    assert "scales" in network.fc
    assert "scales" in network.layers[0].self_attn.q_proj
    assert "scales" not in network.layers[0].mlp_conv.kernel_projection
    assert "scales" not in network.candidate_selector.hidden_projection
    with pytest.raises(CheckpointError, match="not quantised"):
        convert_drafter(tmp_path / "out", tmp_path / "again", options)


def test_the_entry_that_drafts_best_is_found(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path)
    assert load_block(drafter).config.first_slot == 1
    options = ConversionOptions(dtype="float32", target=target)
    conversion = convert_drafter(drafter, tmp_path / "out", options)
    assert conversion.config == load_block(tmp_path / "out").config
    assert conversion.config.first_slot == 0
    assert conversion.config.depth_scales is not None
    (line,) = conversion.provenance["notes"]
    assert "100% with the first draft at entry 0" in line
    assert "layers one earlier" in line
    assert "layers one later" in line
    assert line.endswith("kept the first draft at entry 0")
    assert conversion.provenance["self_test"]["acceptance"] == 1
    assert not conversion.warnings


def test_a_layout_that_fits_stays(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, sample_from_anchor=True)
    options = ConversionOptions(dtype="float32", target=target)
    conversion = convert_drafter(drafter, tmp_path / "out", options)
    assert conversion.config.first_slot == 0
    assert conversion.provenance["notes"][0].endswith("kept the config")

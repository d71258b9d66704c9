"""Medusa heads from files: what is recognised, converted, and refused by the names of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert.conversion import ConversionOptions, convert_drafter
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.medusa import load as load_medusa
from tests.convert import handmade

Values = dict[str, np.ndarray]
CONFIG = {"medusa_num_heads": 2, "hidden_size": 8, "base_model_name_or_path": "org/vicuna"}


def write(folder: Path, values: Values, config: dict[str, Any] | None = None) -> Path:
    handmade.write_config(folder, CONFIG if config is None else config)
    path = folder / "medusa_lm_head.safetensors"
    path.write_bytes(handmade.safetensors_bytes(values))
    return folder


def without(*names: str) -> Values:
    return {name: value for name, value in handmade.medusa(3).items() if name not in names}


def with_(name: str, shape: tuple[int, ...]) -> Values:
    return {**handmade.medusa(3), name: np.zeros(shape, np.float32)}


BAD: dict[str, tuple[Values, dict[str, Any], str]] = {
    "missing": (without("1.0.linear.bias"), CONFIG, r"1\.0\.linear\.bias is missing, expected sh"),
    "no final layer": (without("0.1.weight"), CONFIG, "the final layer of the first head.*none"),
    "shape": (with_("2.0.linear.weight", (8, 9)), CONFIG,
        r"2\.0\.linear\.weight' has shape \[8, 9\], expected \[8, 8\]"),
    "rows": (with_("1.1.weight", (71, 8)), CONFIG, r"1\.1\.weight' has shape \[71, 8\], expected"),
    "unexpected": (with_("norm.weight", (8, )), CONFIG, "not part of Medusa heads: 'norm.weight'"),
    "twice": (with_("medusa_head.0.1.weight", (70, 8)), CONFIG, "both stand for heads.0.1.weight"),
    "whole model": (with_("model.embed_tokens.weight", (70, 8)), {**CONFIG, "model_type": "llama"},
        "in a Medusa-2 model both were trained"),
    "too few": (handmade.medusa(2), {**CONFIG, "medusa_num_heads": 5}, "medusa_num_heads 5, but"),
    "hidden": (handmade.medusa(2), {**CONFIG, "hidden_size": 16}, "hidden_size 16, but the tens"),
    "layers": (handmade.medusa(2), {**CONFIG, "medusa_num_layers": 2}, "num_layers 2, but the te"),
    "vllm's layers": (handmade.medusa(2), {"model_type": "medusa", "num_hidden_layers": 2},
        "num_hidden_layers 2, but the te"),
    "vocabulary": (handmade.medusa(2), {**CONFIG, "vocab_size": 90}, "vocab_size 90, but"),
    "too many heads": (handmade.medusa(65, 1, 1), {"medusa_num_heads": 2}, "num_heads must be an"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    values, config, message = BAD[case]
    source = write(tmp_path / "source", values, config)
    assert recognise(source)[0].NAME == "Medusa heads"
    with pytest.raises(CheckpointError, match=message):
        load_medusa(source)
    with pytest.raises(CheckpointError, match=message):
        convert_drafter(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (note,) = inspect_checkpoint(source).notes
    assert note.isprintable()


def test_inspection_names_the_target(tmp_path: Path) -> None:
    found = inspect_checkpoint(write(tmp_path, handmade.medusa(5)))
    assert found.kind == "Medusa heads with fasterdecoding names, for 'org/vicuna'"
    assert found.notes == ("config.json says medusa_num_heads 2, the file has 5 heads",)
    assert found.config is not None
    assert found.config.to_dict()["num_heads"] == 5


def test_pickles_are_for_convert(tmp_path: Path) -> None:
    handmade.write_config(tmp_path, CONFIG)
    values = handmade.medusa(2)
    handmade.write_zip(tmp_path / "medusa_lm_head.pt", handmade.pickled(values), values)
    with pytest.raises(CheckpointError, match="loadable by `redrafter-mlx convert`"):
        recognise(tmp_path)


@pytest.mark.parametrize(("options", "message"), [
    ({"rnn_activation": "silu"}, "--rnn-activation is not for Medusa heads"),
    ({"tree": "static"}, "a static tree needs --target"),
])  # fmt: skip
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = write(tmp_path / "source", handmade.medusa(2))
    with pytest.raises(ConfigError, match=message):
        convert_drafter(source, tmp_path / "out", ConversionOptions(**options))


def test_a_tree_is_no_option_of_recurrent_drafters(tmp_path: Path) -> None:
    handmade.write_checkpoint(tmp_path / "source", "safetensors")
    with pytest.raises(ConfigError, match="--tree is not for"):
        convert_drafter(tmp_path / "source", tmp_path / "out", ConversionOptions(tree="static"))

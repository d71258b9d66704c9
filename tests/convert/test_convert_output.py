"""What is written: whole or not at all, quantised, sliced, described, back to PyTorch, and said."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, create_autospec

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import HfApi
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.convert import publication
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.export import export_drafter
from mlx_redrafter.convert.vocabulary import choose_rows, count_tokens
from mlx_redrafter.errors import CheckpointError, ConfigError, DataError
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.version import __version__
from tests.convert import handmade
from tests.convert.handmade import convert
from tests.helpers.models import random_drafter

WIDE = {**handmade.CONFIG, "hidden_size": 64, "exit_dim": 64, "vocab_size": 96}
OUTPUT = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return handmade.write(tmp_path / "source", handmade.tensors(WIDE), WIDE, "pytorch_model.bin")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_folder_says_where_it_comes_from(source):
    out = source.parent / "deep" / "out"
    convert(source, out)
    assert files(out) == OUTPUT
    assert files(out.parent) == ["out"]
    values = read_config(out)
    assert values["model_type"] == "recurrent_drafting_drafter"
    assert values["conversion"]["source"] == "source"
    assert values["conversion"]["converter"] == f"mlx_redrafter {__version__}"
    digest = hashlib.sha256((source / "pytorch_model.bin").read_bytes()).hexdigest()
    assert values["conversion"]["sha256"] == {"pytorch_model.bin": digest}
    written = "".join(map(str, contents(out).values()))
    assert str(source.parent) not in written


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 64), (6, 32), (8, 64)])
def test_quantisation_is_recorded_as_by_mlx_lm(source, bits, group_size):
    out = source.parent / "out"
    convert(source, out, quantize=True, q_bits=bits, q_group_size=group_size)
    assert read_config(out)["quantization"] == {"group_size": group_size, "bits": bits}
    layer: Any = load_drafter(out).lm_head[-1]
    assert (layer.bits, layer.group_size) == (bits, group_size)


def test_a_quantised_copy_is_for_the_same_target(tmp_path):
    target = {"name": "org/Model", "tokens": "0123", "fingerprint": "4567"}
    save_drafter(random_drafter(64, 64), tmp_path / "given", {"target": target})
    convert(tmp_path / "given", tmp_path / "out", quantize=True)
    assert read_config(tmp_path / "out")["target"] == target
    assert "base_model: org/Model" in (tmp_path / "out" / "README.md").read_text()


def test_impossible_quantisation(source):
    for bits, group_size in ((5, 64), (4, 48), (0, 64)):
        with pytest.raises(ConfigError, match="must be one of"):
            convert(
                source, source.parent / "out", quantize=True, q_bits=bits, q_group_size=group_size
            )
    narrow = handmade.write(source.parent / "narrow", handmade.tensors())
    with pytest.raises(ConfigError, match="group_size 64"):  # which divides no width
        convert(narrow, source.parent / "out", quantize=True)
    assert files(source.parent) == ["narrow", "source"]


def test_an_earlier_conversion_and_an_empty_folder_are_replaced(source, monkeypatch):
    out = source.parent / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    convert(source, Path())
    assert os.listdir() == os.listdir(out) != []  # no other folder of this name
    before = contents(out)
    (out / ".DS_Store").write_text("")  # by macOS's Finder
    (out / ".unfinished-a1b2c3d4").mkdir()  # by a conversion that was killed
    convert(source, out, dtype="float32")
    assert contents(out) != before
    assert files(out) == [".DS_Store", ".unfinished-a1b2c3d4", *OUTPUT]
    assert files(out.parent) == ["out", "source"]


def test_failures_keep_the_earlier_output(source, monkeypatch):
    out, full = source.parent / "out", OSError("disk full")
    convert(source, out)
    before = contents(out)
    rename = Mock(wraps=os.rename, side_effect=[DEFAULT, full, *[DEFAULT] * 9])
    broken = {"conversion.render_card": Mock(side_effect=full), "publication.os.rename": rename}
    for name, function in broken.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"mlx_redrafter.convert.{name}", function)
            with pytest.raises(OSError, match="disk full"):
                convert(source, out, dtype="float32")
        assert contents(out) == before
        assert files(out.parent) == ["out", "source"]
    assert rename.call_count > 1


@pytest.mark.parametrize(
    ("dtype", "bits", "tolerance"),
    [("float32", None, 0), ("bfloat16", None, 0.005), ("float32", 4, 0.15), ("float32", 8, 0.01)],
)
def test_back_to_pytorch(source, dtype, bits, tolerance):
    options: Any = {} if bits is None else {"quantize": True, "q_bits": bits}
    mlx, back = source.parent / "mlx", source.parent / "back"
    convert(source, mlx, dtype=dtype, **options)
    assert export_drafter(mlx, back) == ()
    assert read_config(back).items() >= WIDE.items()
    convert(back, source.parent / "again", dtype="float32")
    original = handmade.tensors(WIDE)
    returned = mx.load(str(back / "model.safetensors"), return_metadata=True)
    assert returned[1]["format"] == "pt"
    assert returned[0].keys() == original.keys()
    for name, value in original.items():
        found = returned[0][name]
        assert str(found.dtype) == f"mlx.core.{dtype}"
        wide = np.array(found.astype(mx.float32))
        np.testing.assert_allclose(wide, value, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "variant", [{"rnn_activation": "identity"}, {"rnn_first_step_bias": False}], ids=str
)
def test_what_apples_code_cannot_compute(tmp_path, variant):
    source = handmade.write(tmp_path / "source", handmade.tensors(WIDE), {**WIDE, **variant})
    convert(source, tmp_path / "mlx")
    with pytest.raises(CheckpointError, match="TensorRT-LLM's recurrence"):
        export_drafter(tmp_path / "mlx", tmp_path / "back")
    assert files(tmp_path) == ["mlx", "source"]


def test_the_most_frequent_tokens_are_kept():
    counts = np.array([0, 5, 0, 7, 5, 0, 9])
    assert choose_rows(counts, [0], 4).tolist() == [0, 1, 3, 6]
    assert choose_rows(counts, [], 5).tolist() == [0, 1, 3, 4, 6]
    assert choose_rows(counts, [99, -1], 7).tolist() == list(range(7))

    for num_rows in (0, 1, 8):
        with pytest.raises(ConfigError, match="vocabulary slice"):
            choose_rows(np.zeros(7), [3], num_rows)
    with pytest.raises(ConfigError, match="needs --target"):
        ConversionOptions(vocab_slice=5, vocab_text=[Path("text")])


def test_texts_to_count_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, message in (("none", "choose another path"), ("latin", "must be UTF-8 text")):
        with pytest.raises(DataError, match=message):
            count_tokens(create_autospec(TokenizerWrapper), [tmp_path / name], 5)


def test_token_ids_out_of_range(tmp_path):
    config = {**handmade.CONFIG, "draft_vocab_size": 2}
    values = handmade.tensors()
    values["lm_head.2.weight"] = values["lm_head.2.weight"][:2]
    handmade.write_config(tmp_path / "source", config)
    for ids, is_valid in (([3, 69], True), ([3, 70], False), ([-1, 3], False), ([3, 3], False)):
        arrays = {name: mx.array(value) for name, value in values.items()}
        arrays["token_ids"] = mx.array(ids, dtype=mx.int32)
        mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), arrays)
        if is_valid:
            convert(tmp_path / "source", tmp_path / "out")
        else:
            with pytest.raises(CheckpointError, match="token_ids in source must be"):
                convert(tmp_path / "source", tmp_path / "out")


def test_upload(tmp_path, monkeypatch):
    hub = create_autospec(HfApi, instance=True)
    hub.create_repo.return_value = "https://hub/me/drafter"
    monkeypatch.setattr(publication, "HfApi", lambda: hub)
    assert publication.upload_folder(tmp_path, "me/drafter") == "https://hub/me/drafter"
    hub.create_repo.assert_called_once_with("me/drafter", exist_ok=True)
    hub.upload_folder.assert_called_once_with(repo_id="me/drafter", folder_path=tmp_path)
    hub.create_repo.side_effect = OSError("offline\nsecond line")
    with pytest.raises(CheckpointError, match=r"complete but could not be .*offline; check"):
        publication.upload_folder(tmp_path, "nobody/nothing")


@pytest.mark.parametrize("top_k", [None, 7, 50])
def test_calibration_outlives_quantising_and_pytorch(tmp_path, top_k):
    measured = {"inverse_temperature": 0.61, "coupling_weight": 0.83}
    drafter = random_drafter(96, 64, draft_top_k=top_k, **measured)  # type: ignore[arg-type]
    save_drafter(drafter, tmp_path / "mlx")
    notes = export_drafter(tmp_path / "mlx", tmp_path / "torch")
    assert ["keeps 50 logits" in note for note in notes] == [True] * (top_k != 50)
    convert(tmp_path / "torch", tmp_path / "back", dtype="float32")
    assert load_drafter(tmp_path / "back").config == drafter.config
    convert(tmp_path / "mlx", tmp_path / "out", quantize=True)
    assert load_drafter(tmp_path / "out").config == drafter.config


def test_convert_by_command(source, tmp_path, cli):
    out, mlx, back = (tmp_path / name for name in ("out", "mlx", "back"))
    found = cli("convert", "-q", "--q-bits", 8, source, out, "--dtype", "bfloat16")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith(f"wrote {out}: hidden_size 64")
    assert "8 bits, groups of 64" in found.out
    assert read_config(out)["quantization"]["bits"] == 8
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n")
    assert "| weights | 8 bits, groups of 64 |" in card
    assert "| vocabulary | 96 |" in card
    assert "converted from `source`" in card
    assert cli("convert", source, mlx).code == 0
    assert "Apple's PyTorch code" in cli("convert", mlx, back, "--to", "pytorch").out
    assert cli("convert", back).code == 0
    shown = cli("convert", source).out
    assert "a recurrent drafter with apple names" in shown
    assert "hidden_size: 64" in shown
    assert re.search(r"rnn_w\.weight +float32 +\[64, 64\]", shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SRC'"),
        (["a", "-q"], "options need a folder to write; add DST"),
        (["a", "b", "--dtype", "int8"], "--dtype"),
        (["a", "b", "--vocab-slice", "5"], "need each other"),
        (["a", "b", "--vocab-slice", "5", "--vocab-text", "t"], "needs --target"),
        (["a", "b", "--to", "pytorch", "-q"], "no option but --dtype"),
        (["a", "b", "-q", "--q-bits", "5"], "must be one of"),
    ],
)
def test_usage_errors(arguments, message, cli):
    found = cli("convert", *arguments)
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert message in found.err

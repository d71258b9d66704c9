"""What is accepted: name sets, prefixes, shards, and configs that say little or nothing."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mlx_redrafter.convert.conversion import Conversion
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.errors import CheckpointError, NonFiniteError
from mlx_redrafter.proposers.redrafter import load as load_drafter
from tests.convert import handmade
from tests.convert.handmade import CONFIG, refusal, write

WIDE = {**CONFIG, "exit_dim": 16}


def convert(folder: Path) -> Conversion:
    return handmade.convert(folder, folder.parent / "out", dtype="float32")


RENAMINGS: dict[str, tuple[Callable[[str], str], str]] = {
    "plural": (
        lambda name: name.replace("lm_head.", "lm_heads.").replace("input_proj.", "input_projs."),
        "plural",
    ),
    "sequential": (lambda name: name.replace("lm_head.", "0."), "sequential"),
    "both prefixes": (lambda name: f"model.drafter.{name}", "apple"),
}


@pytest.mark.parametrize("config", [CONFIG, WIDE, {**WIDE, "rnn": False}])
@pytest.mark.parametrize("renaming", RENAMINGS)
def test_name_sets_are_equal(tmp_path, renaming, config):
    rename, name_set = RENAMINGS[renaming]
    values = handmade.tensors(config)
    renamed = {rename(name): value for name, value in values.items()}
    source = write(tmp_path / "source", renamed, config)
    assert convert(source).provenance["name_set"] == name_set
    stored = dict(load_drafter(tmp_path / "out").parameters())
    np.testing.assert_array_equal(
        np.array(stored["lm_head"][0]["linear"]["weight"]), values["lm_head.0.linear.weight"]
    )


def test_a_verifier_and_unused_tensors_are_left_out_and_noted(tmp_path):
    extra = {
        "verifier.model.embed_tokens.weight": np.zeros((3, 3), np.float32),
        "emb_norm.weight": np.ones(8, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    values = handmade.tensors() | extra
    conversion = convert(write(tmp_path / "source", values))
    notes = " ".join(conversion.provenance["notes"])
    assert "emb_norm.weight" in notes
    assert "rotary_emb.inv_freq" in notes
    assert "1 tensors of the target" in notes
    load_drafter(tmp_path / "out")


def test_the_speculators_fork_is_warned_about(tmp_path):
    config = {**CONFIG, "speculators_model_type": "recurrent_drafting"}
    conversion = convert(write(tmp_path / "source", handmade.tensors(), config))
    assert "speculators" in conversion.warnings[0]


@pytest.mark.parametrize("config", [CONFIG, WIDE, {**CONFIG, "rnn": False}])
def test_shapes_say_what_a_config_leaves_out(tmp_path, config):
    source = write(tmp_path / "source", handmade.tensors(config), config)
    (source / "config.json").unlink()
    found = convert(source).config
    for key in ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn"):
        assert getattr(found, key) == config[key]


def test_apples_default_of_minus_one_says_nothing(tmp_path):
    config = {key: -1 if isinstance(v, int) else v for key, v in CONFIG.items()} | {"rnn": True}
    source = write(tmp_path / "source", handmade.tensors(), config)
    assert convert(source).config.hidden_size == CONFIG["hidden_size"]


@pytest.mark.parametrize(("given", "expected"), [
    ({"rnn_activation": "identity", "rnn_first_step_bias": False, "draft_top_k": None}, ) * 2,
    ({}, {"rnn_activation": "silu", "rnn_first_step_bias": True, "draft_top_k": 50}),
], ids=["ours", "Apple's"])  # fmt: skip
def test_variants_stay(tmp_path, given, expected):
    found = convert(write(tmp_path / "source", handmade.tensors(), {**CONFIG, **given})).config
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("hidden_size", 9, "'rnn_u.weight' has shape [8, 8], expected [9, 9]"),
    ("exit_dim", 13, "'input_proj.bias' has shape [12], expected [13]"),
    ("vocab_size", 71, "'lm_head.2.weight' has shape [70, 12], expected [71, 12]"),
    ("num_draft_layers", 3, "lm_head.3.weight is missing, expected shape [70, 12]"),
    ("num_draft_layers", 1, "'lm_head.1.linear.weight' of shape [12, 12] is unexpected"),
    ("rnn", False, "'rnn_w.weight' of shape [8, 8] is unexpected"),
    ("hidden_size", "8", "hidden_size must be an integer"),
    ("num_draft_layers", 10**9, "num_draft_layers must be an integer"),
    ("rnn_activation", "tanh", "rnn_activation must be"),
])  # fmt: skip
def test_a_contradicting_config(tmp_path, key, value, expected):
    source = write(tmp_path / "source", handmade.tensors(), {**CONFIG, key: value})
    assert expected in refusal(source)


UNKNOWN = "lm_head.2.bias", "lm_head.9.linear.weight", "rnn_v.weight", "attention.q.weight"
MORE: list[tuple[str, np.ndarray, str]] = [
    *((name, np.zeros((12, 12), np.float32), f"'{name}'") for name in UNKNOWN),
    ("lm_heads.2.weight", handmade.tensors()["lm_head.2.weight"],
        "'lm_head.2.weight' and 'lm_heads.2.weight' both stand for lm_head.2.weight"),
    ("rnn_u.bias", np.zeros(8), "'rnn_u.bias' is F64"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), MORE, ids=[name for name, *_ in MORE])
def test_foreign_tensors(tmp_path, name, value, message):
    assert message in refusal(write(tmp_path / "source", handmade.tensors() | {name: value}))


def test_a_dtype_that_mlx_lacks_in_a_tensor_that_is_left_out(tmp_path):
    tensors = handmade.tensors() | {"verifier.x": np.zeros(8)}
    source = write(tmp_path / "source", tensors, CONFIG)
    with pytest.raises(CheckpointError, match=r"cannot read .*F64; save it in float32"):
        handmade.convert(source, tmp_path / "out")


def test_damaged_weights_are_named(tmp_path):
    for value, message in (
        (np.nan, r"NaN or infinite weights in rnn_u\.bias"),
        (np.inf, r"NaN or infinite weights in rnn_u\.bias"),
        (1e6, r"in rnn_u\.bias; .* bfloat16 if float16 overflowed"),
    ):
        values = handmade.tensors()
        values["rnn_u.bias"][3] = value
        source = write(tmp_path / "source", values, CONFIG)
        with pytest.raises(NonFiniteError, match=message):
            handmade.convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    handmade.convert(source, tmp_path / "out", dtype="bfloat16")


FOREIGN: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "ambiguous": (handmade.medusa(1), {}, "either a ReDrafter head or a Medusa head"),
    "speculators": (handmade.tensors(), {"speculators_model_type": "mlp"},
        "a drafter of speculators_model_type 'mlp'"),
    "a model": ({"model.embed_tokens.weight": np.zeros((2, 2), "f4")}, {}, "a language model"),
    "quantised": (handmade.tensors(), {"quantization": {"bits": 4}}, "quantised already"),
    "tensor parallel": (handmade.tensors(), {"mapping": {"tp_size": 2}}, "one rank of a TensorRT"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_no_recurrent_drafter_is_refused_by_name(tmp_path, case):
    values, config, kind = FOREIGN[case]
    source = write(tmp_path / "source", values, config)
    assert kind in refusal(source)
    assert kind in inspect_checkpoint(source).kind


def test_ranks_of_tensorrt_are_refused(tmp_path):
    source = write(tmp_path / "source", handmade.tensors())
    for rank in (0, 1):
        (source / f"rank{rank}.safetensors").write_bytes(b"")
    assert "split over several ranks" in refusal(source)


SHARDS = "model-1.safetensors", "model-2.safetensors"
OWNERS = {name: SHARDS[i % 2] for i, name in enumerate(handmade.tensors())}


def shards(folder: Path, owners: Mapping[str, str] = OWNERS) -> Path:
    """Two shards with the tensors of a drafter and an index that says ``owners``."""
    for file in SHARDS:
        values = {name: one for name, one in handmade.tensors().items() if OWNERS[name] == file}
        write(folder, values, file=file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(owners)}))
    return folder


def test_shards(tmp_path):
    conversion = convert(shards(tmp_path / "source"))
    assert sorted(conversion.provenance["sha256"]) == list(SHARDS)


def test_an_index_that_lies(tmp_path):
    loud = "model\x1b[2J.safetensors"
    handmade.write_config(tmp_path / "source")
    (tmp_path / "source" / loud).write_bytes(b"")
    for name, owner, message in (
        ("rnn_w.weight", "model-1.safetensors", "'rnn_w.weight', which the index puts elsewhere"),
        ("phantom", "model-1.safetensors", "lack: 'phantom'"),
        ("rnn_w.weight", "../model-2.safetensors", "'../model-2.safetensors', which is not a file"),
        ("rnn_w.weight", loud, "'model\\x1b[2J.safetensors', which is not a file"),
    ):
        assert message in refusal(shards(tmp_path / "source", OWNERS | {name: owner}))
    assert "expected a weight_map" in refusal(shards(tmp_path / "source", {}))


def test_a_folder_without_weights(tmp_path):
    handmade.write_config(tmp_path / "source")
    assert "expected model.safetensors" in refusal(tmp_path / "source")


def test_inspection_describes_without_values_and_says_why_not(tmp_path):
    source = write(tmp_path / "source", handmade.tensors())
    inspection = inspect_checkpoint(source)
    assert inspection.config.hidden_size == CONFIG["hidden_size"]
    assert inspection.kind == "a recurrent drafter with apple names"
    convert(source)
    kind = "a recurrent drafter, written by this converter"
    assert inspect_checkpoint(tmp_path / "out").kind == kind
    values = handmade.tensors()
    del values["rnn_u.bias"]
    inspection = inspect_checkpoint(write(source, values))
    assert inspection.config is None
    assert "rnn_u.bias is missing" in inspection.notes[0]


def test_a_hub_repository_keeps_its_name(tmp_path, monkeypatch):
    snapshot = write(tmp_path / "snapshot", handmade.tensors(), CONFIG)
    download = Mock(return_value=snapshot)
    monkeypatch.setattr("mlx_redrafter.hub.fetch", download)
    conversion = handmade.convert("org/drafter", tmp_path / "out")
    assert conversion.provenance["source"] == "org/drafter"
    # First what tells whether it is a model with a module, of which no more would be fetched.
    first, rest = (call.args[:2] for call in download.call_args_list)
    assert first == ("org/drafter", ["config.json", "model.safetensors.index.json"])
    assert rest == ("org/drafter", ["*.json", "*.safetensors", "*.bin", "*.pt"])

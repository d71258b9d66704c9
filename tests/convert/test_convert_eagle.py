"""EAGLE heads through the converter: pickles and safetensors, what it says of them and refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mlx_redrafter.checkpoint_files import read_config  # noqa: E402
from mlx_redrafter.checkpoints.bundled import find_bundled  # noqa: E402
from mlx_redrafter.convert.eagle import with_rope  # noqa: E402
from mlx_redrafter.convert.recognition import inspect_checkpoint  # noqa: E402
from mlx_redrafter.errors import CheckpointError  # noqa: E402
from mlx_redrafter.proposers.checkpoint import save_drafter  # noqa: E402
from mlx_redrafter.proposers.eagle import load as load_eagle  # noqa: E402
from mlx_redrafter.proposers.eagle.config import EagleConfig  # noqa: E402
from mlx_redrafter.proposers.eagle.network import Eagle  # noqa: E402
from mlx_redrafter.proposers.fit import Prediction, ReadSequence  # noqa: E402
from mlx_redrafter.target.target import Target  # noqa: E402
from tests.convert.handmade import convert  # noqa: E402
from tests.helpers.equality import assert_same_weights  # noqa: E402
from tests.helpers.models import change_config, layer_inputs  # noqa: E402
from tests.helpers.published_eagle import LAYOUTS, write_head  # noqa: E402

TARGET = find_bundled("target")
FOR_TARGET: Any = {"target": TARGET, "dtype": "float32"}


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3", "speculators 3.1"])
def test_a_converted_head_is_the_published_one(name, tmp_path):
    source = tmp_path / "source"
    tensors = write_head(source, LAYOUTS[name])
    published = load_eagle(source)
    torch.save(tensors, source / "pytorch_model.bin")  # as older heads have them
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\*.safetensors"):
        load_eagle(source)
    conversion = convert(source, tmp_path / "out", dtype="float32")
    assert conversion.config == published.config
    assert_same_weights(load_eagle(tmp_path / "out"), published)


def test_quantised_heads_load(tmp_path):
    write_head(tmp_path / "source", LAYOUTS["EAGLE-3"])
    convert(tmp_path / "source", tmp_path / "out", quantize=True, q_group_size=32)
    assert read_config(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 4}
    assert load_eagle(tmp_path / "out").lm_head.bits == 4


def test_inspection_names_the_kind_and_the_target(tmp_path):
    write_head(tmp_path, LAYOUTS["speculators"])
    change_config(tmp_path, speculators_config={"verifier": {"name_or_path": "org/model"}})
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.kind == "EAGLE-3 head, with speculators' names, for 'org/model'"
    assert "embed_tokens.weight" in inspection.notes[0]
    change_config(tmp_path, fc_norm=True)
    refused = inspect_checkpoint(tmp_path)
    assert refused.config is None
    assert "exclude each other" in refused.notes[0]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random head for the bundled target, of which few tokens are read."""
    monkeypatch.setattr("mlx_redrafter.convert.selftest.TOKENS_PER_PROMPT", 8)
    values = read_config(TARGET)
    sizes = {name: values[name] for name in ("hidden_size", "vocab_size", "num_attention_heads")}
    own = {"intermediate_size": 64, "num_key_value_heads": 1, "captured_layers": (0, 1)}
    save_drafter(Eagle(EagleConfig(version=3, rope_theta=3.0, **own, **sizes)), tmp_path / "source")
    return tmp_path / "source"


def test_the_target_tells_how_much_it_accepts(source, tmp_path):
    """Of a random head, and one that was made for another model."""
    conversion = convert(source, tmp_path / "out", **FOR_TARGET)
    measured = conversion.provenance["self_test"]
    assert measured["positions"] == 32
    assert measured["acceptance"] < 0.2
    assert "later layers, rotated as the target " in conversion.provenance["notes"][-1]
    assert "probably trained for another model" in conversion.warnings[0]
    write_head(tmp_path / "other", LAYOUTS["EAGLE-3"])
    with pytest.raises(CheckpointError, match="hidden_size 32 does not match the target's"):
        convert(tmp_path / "other", tmp_path / "none", **FOR_TARGET)


def test_the_layers_are_those_that_the_target_accepts_most(source, tmp_path, monkeypatch):
    """Acceptance is made up here: all drafts from the outputs of the layers that the file names."""

    def predict(eagle: Eagle, target: Target, text: ReadSequence) -> Prediction:
        tokens, chosen = text.tokens[:-1], text.top_ids[1:]
        target.modules.watch((1, 2))
        inputs = layer_inputs(target, tokens, (1, 2))
        is_right = mx.allclose(inputs, text.states, atol=1e-3)
        ids = mx.arange(target.vocab_size) == mx.where(is_right, chosen[:, :1], chosen[:, 1:2])
        return Prediction(ids.astype(mx.float32), chosen, text.top_log_probs[1:])

    monkeypatch.setattr("mlx_redrafter.convert.eagle.predict_next", predict)
    conversion = convert(source, tmp_path / "out", **FOR_TARGET)
    assert load_eagle(tmp_path / "out").config.captured_layers == (1, 2)
    assert re.search("as it says 0%,.* later layers 100%", conversion.provenance["notes"][-1])
    assert re.search("; used later layers", conversion.provenance["notes"][-1])
    assert conversion.warnings == ()


def test_the_rope_of_the_target_is_tried_with_the_same_weights(tmp_path):
    heads = []
    for theta in (3.0, 500.0):
        write_head(tmp_path, replace(LAYOUTS["EAGLE-3"], layer={"rope_theta": theta}))
        heads.append(load_eagle(tmp_path))
    head, expected = heads
    rope = {"rope_theta": 500.0, "rope_scaling": None}
    other = with_rope(head, rope)
    assert with_rope(other, rope) is None
    rows = mx.random.normal((2, 5, 32), key=mx.random.key(1))
    outputs = [net(rows[0], rows[1], net.make_cache()) for net in (other, expected, head)]
    assert mx.array_equal(outputs[0], outputs[1]).item()
    assert not mx.allclose(outputs[0], outputs[2]).item()

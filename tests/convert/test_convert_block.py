"""Block drafters through the converter: what comes out drafts as the published one does."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoint_files import named_parameters, read_config
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.along_text import predict
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.target.target import Target
from tests.conftest import Trained
from tests.golden.block_layouts import LAYOUTS, tensors
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.cli import run
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import layer_inputs
from tests.helpers.mtp import write


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_drafter_is_the_published_one(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors(LAYOUTS[name]), LAYOUTS[name].config)
    expected = load_block(source)
    conversion = convert_drafter(source, tmp_path / "out", ConversionOptions(dtype="float32"))
    converted = load_block(tmp_path / "out")
    assert conversion.config == converted.config == expected.config
    assert_same_weights(converted, expected)
    kind = f"a {expected.config.name} drafter, "
    packaging = re.sub(" .*", "", name).replace("NVIDIA", "DeepSpec")
    assert inspect_checkpoint(source).kind == f"{kind}as {packaging} writes it"
    assert inspect_checkpoint(tmp_path / "out").kind == f"{kind}written by this package"


@pytest.mark.parametrize("link", LINKS)
def test_small_layers_are_never_quantised(link: str, tmp_path: Path) -> None:
    sizes = {**LINKS[link], "rank": 32} if LINKS[link].get("rank") else LINKS[link]
    save_drafter(random_block(block_config(97, 32, has_confidence=True, **sizes)), tmp_path / "in")
    options = ConversionOptions(quantize=True, q_bits=8, q_group_size=32)
    convert_drafter(tmp_path / "in", tmp_path / "out", options)
    assert read_config(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 8}
    network = load_block(tmp_path / "out")
    assert network.layers[0].self_attn.q_proj.bits == 8
    small = [name for name in named_parameters(network) if name.endswith("scales")]
    assert not [n for n in small if "conv" in n or "selector" in n or "confidence" in n]
    with pytest.raises(CheckpointError, match="quantised already"):
        convert_drafter(tmp_path / "out", tmp_path / "again", options)


def test_what_a_block_drafter_cannot_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = next(iter(LAYOUTS.values()))
    source = write(tmp_path / "source", tensors(layout), layout.config)
    with pytest.raises(ConfigError, match="is not for a block drafter"):
        convert_drafter(source, tmp_path / "out", ConversionOptions(rnn_activation="silu"))
    shown = run(capsys, "convert", source)
    assert "mask_token_id" in shown.out
    values = read_config(source)
    broken = {**values, "num_hidden_layers": 7}
    (source / "config.json").write_text(json.dumps(broken))
    assert "cannot be converted" in inspect_checkpoint(source).kind


def test_the_entry_that_the_target_accepts_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stories: Trained
) -> None:
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
    options = ConversionOptions(target=stories.folder, dtype="float32")
    for name in ("right", "wrong"):
        conversion = convert_drafter(tmp_path / name, tmp_path / f"{name}-out", options)
        assert conversion.config.first_slot == 0
        assert conversion.config.depth_scales is not None
        assert conversion.provenance["self_test"]["acceptance"] > 0.9
        (note,) = conversion.provenance["notes"]
        assert re.search(
            r"as it says \d+%, entry [01] first \d+%, earlier layers \d+%, later layers \d+%, "
            r"neighbours rotated \d+%; used (as it says|entry 0 first)$",
            note,
        )

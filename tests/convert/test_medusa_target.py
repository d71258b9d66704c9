"""Medusa heads from files, and with a trained target: the self-test, and the text that comes out.

Heads are fitted to stories260k within seconds, so acceptance is real, if modest.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter import generate, load, stream_generate
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert.conversion import Conversion, convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.convert.selftest import MIN_ACCEPTANCE
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.medusa import load as load_medusa
from mlx_redrafter.proposers.medusa.network import Medusa
from tests.conftest import Trained
from tests.convert import handmade
from tests.convert.fitted import fit_medusa
from tests.convert.handmade import refusal
from tests.helpers.cli import run
from tests.helpers.models import shared_path

pytestmark = pytest.mark.usefixtures("texts_are_kept")
TEXT = "text/tinystories-train.txt"
PROMPT = "Lily wanted to go to the park"


@pytest.fixture(scope="module")
def source(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted heads in the layout of FasterDecoding's code."""
    folder = tmp_path_factory.mktemp("fitted") / "medusa"
    fit_medusa(stories.model, stories.tokenizer, shared_path(TEXT), folder)
    return folder


def convert(source: Path, stories: Trained, out: Path, **options: Any) -> Conversion:
    return convert_drafter(source, out, ConversionOptions(target=stories.folder, **options))


OPTIONS: dict[str, dict[str, Any]] = {
    "4 bits, sliced": {"dtype": "float32", "quantize": True, "vocab_slice": 256,
        "vocab_text": [Path("text.txt")]},
    "static": {"dtype": "float32", "tree": "static"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_converted_heads_give_the_targets_text(
    source: Path, stories: Trained, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(shared_path(TEXT).read_text(encoding="utf-8")[:20_000])
    conversion = convert(source, stories, tmp_path / "out", **OPTIONS[name])
    measured = conversion.provenance["self_test"]
    assert measured["acceptance"] > MIN_ACCEPTANCE
    assert conversion.warnings == ()
    config = read_config(tmp_path / "out")
    assert config["model_type"] == "redrafter_medusa"
    assert config["score_scale"] != 1
    accuracies = config["rank_accuracies"]
    assert accuracies[0][0] == pytest.approx(measured["acceptance"], abs=0.06)
    assert accuracies[0][0] > accuracies[1][0] > accuracies[1][5]
    assert "[Medusa](https://arxiv.org/abs/2401.10774) heads for `stories260k`" in (
        tmp_path / "out" / "README.md"
    ).read_text(encoding="utf-8")

    if name == "static":  # a conversion can be converted again, and knows what was measured
        again = convert_drafter(tmp_path / "out", tmp_path / "again", ConversionOptions("float32"))
        assert again.config == conversion.config
    model, tokenizer, heads = load(stories.folder, drafter=tmp_path / "out")
    assert isinstance(heads, Medusa)
    assert heads.config.tree == ("static" if name == "static" else "dynamic")
    plain = generate(model, tokenizer, PROMPT, drafter=None, max_tokens=60)
    for shape in ({}, {"beam_width": 1, "beam_length": 3}, {"beam_length": 3, "tree_nodes": 9}):
        options = {"drafter": heads, "max_tokens": 60, **shape}
        responses = list(stream_generate(model, tokenizer, PROMPT, **options))
        assert "".join(response.text for response in responses) == plain
        if shape:
            assert responses[-1].tokens_per_step > 1.2


def test_heads_that_know_nothing_are_warned_about(stories: Trained, tmp_path: Path) -> None:
    source = write_heads(tmp_path / "source", handmade.medusa(3, hidden=64, rows=512), {})
    (warning,) = convert(source, stories, tmp_path / "out").warnings
    assert "probably trained for another model" in warning


@pytest.mark.parametrize(
    ("hidden", "rows", "message"),
    [(32, 512, "hidden_size 32 does not match"), (64, 700, "vocab_size 700 does not match")],
)
def test_heads_for_another_model_are_refused(
    stories: Trained, tmp_path: Path, hidden: int, rows: int, message: str
) -> None:
    values = handmade.medusa(3, hidden, rows)
    assert message in refusal(write_heads(tmp_path / "source", values, {}), target=stories.folder)
    values["0.1.weight"][0] = float("nan")  # sizes are compared before any weights are read
    source = write_heads(tmp_path / "source", values, {})
    with pytest.raises(CheckpointError, match=message):
        load(stories.folder, drafter=source)


def test_the_command_line(
    source: Path, stories: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published files are used as they are by every command."""
    pair = ["--model", stories.folder, "--drafter", source]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT)
    assert run(capsys, "check", *pair, "-p", PROMPT, "-m", 9).out.startswith("equal: 9 tokens")
    options = ["--prompts", prompts, "-m", 6, "--shapes", "4x3x9", "--repeats", 1]
    found = run(capsys, "bench", "compare", *pair, *options)
    assert (found.code, "top_n w4 l3 n9" in found.out) == (0, True)
    out = tmp_path / "out"
    found = run(capsys, "convert", source, out, "--target", stories.folder, "--tree", "static")
    assert "2 heads of 512 tokens with 1 blocks, static tree, float16" in found.out


Values = dict[str, np.ndarray]
CONFIG = {"medusa_num_heads": 2, "hidden_size": 8, "base_model_name_or_path": "org/vicuna"}


def write_heads(folder: Path, values: Values, config: dict[str, Any] = CONFIG) -> Path:
    return handmade.write(folder, values, config, "medusa_lm_head.safetensors")


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
    source = write_heads(tmp_path / "source", values, config)
    assert recognise(source)[0].NAME == "Medusa heads"
    with pytest.raises(CheckpointError, match=message):
        load_medusa(source)
    assert re.search(message, refusal(source))
    (note,) = inspect_checkpoint(source).notes
    assert note.isprintable()


def test_inspection_names_the_target(tmp_path: Path) -> None:
    found = inspect_checkpoint(write_heads(tmp_path, handmade.medusa(5)))
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
    source = write_heads(tmp_path / "source", handmade.medusa(2))
    with pytest.raises(ConfigError, match=message):
        convert_drafter(source, tmp_path / "out", ConversionOptions(**options))


def test_a_tree_is_no_option_of_recurrent_drafters(tmp_path: Path) -> None:
    handmade.write_checkpoint(tmp_path / "source", "safetensors")
    with pytest.raises(ConfigError, match="--tree is not for"):
        convert_drafter(tmp_path / "source", tmp_path / "out", ConversionOptions(tree="static"))

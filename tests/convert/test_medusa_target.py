"""Converted Medusa heads with a trained target: the self-test, and the text that comes out.

Heads are fitted to stories260k within seconds, so acceptance is real, if modest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter import generate, load, stream_generate
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.output import Conversion
from mlx_redrafter.convert.selftest import MIN_ACCEPTANCE
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.medusa.network import Medusa
from tests.conftest import Trained
from tests.convert import handmade
from tests.convert.fitted import fit_medusa
from tests.helpers.cli import run
from tests.helpers.models import shared_path

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
    handmade.write_config(tmp_path / "source", {"medusa_num_heads": 3})
    content = handmade.safetensors_bytes(handmade.medusa(3, hidden=64, rows=512))
    (tmp_path / "source" / "model.safetensors").write_bytes(content)
    (warning,) = convert(tmp_path / "source", stories, tmp_path / "out").warnings
    assert "probably trained for another model" in warning


@pytest.mark.parametrize(
    ("hidden", "rows", "message"),
    [(32, 512, "hidden_size 32 does not match"), (64, 700, "vocab_size 700 does not match")],
)
def test_heads_for_another_model_are_refused(
    stories: Trained, tmp_path: Path, hidden: int, rows: int, message: str
) -> None:
    source = tmp_path / "source"
    handmade.write_config(source, {"medusa_num_heads": 3})
    values = handmade.medusa(3, hidden, rows)
    values["0.1.weight"][0] = float("nan")  # sizes are compared before any weights are read
    (source / "model.safetensors").write_bytes(handmade.safetensors_bytes(values))
    with pytest.raises(CheckpointError, match=message):
        load(stories.folder, drafter=source)
    values = handmade.medusa(3, hidden, rows)
    (source / "model.safetensors").write_bytes(handmade.safetensors_bytes(values))
    with pytest.raises(CheckpointError, match=message):
        convert(source, stories, tmp_path / "out")


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

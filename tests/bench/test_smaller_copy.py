"""A smaller copy of the model as its drafter: offered and advised where it is predicted to pay."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_redrafter.bench.chips import CHIPS
from mlx_redrafter.bench.model_shape import ModelShape, shape_of_config
from mlx_redrafter.bench.smaller_copy import advise_copy, find_copy, predict_gain
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch
from mlx_redrafter.cli.choose_drafter import choose_drafter
from tests.bench.test_advice import LLAMA_8B
from tests.helpers.cli import Cli

# Every second layer of this Llama attends to the newest tokens only.
WINDOWED = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
LLAMA = shape_of_config("llama", LLAMA_8B)


def test_a_copy_pays_where_reading_the_weights_takes_the_time() -> None:
    gain = predict_gain(LLAMA, 4, CHIPS["M4"])
    # A chain of three drafts: four tokens verified at once, three readings of 0.28 of the bytes.
    most = (1 + 0.8 + 0.8**2 + 0.8**3) / (1 + 3 * 0.5625 / 2)
    assert 0.9 * most < gain < most
    small = replace(LLAMA, parameters=1.35e8, active=1.35e8)
    assert predict_gain(small, 4, CHIPS["M4 Max"]) < 1
    quantised = replace(LLAMA, bits=4)
    assert predict_gain(quantised, 4, CHIPS["M4"]) < 1


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (LLAMA, "Make a copy in 4 bits: python -m mlx_lm convert --hf-path org/Llama --mlx-path "),
        (replace(LLAMA, active=1.35e8), "It would not pay: predicted 0."),
        (replace(LLAMA, bits=4), "It would not pay: the model is stored in 4 bits itself."),
        (replace(LLAMA, bits=8), "mlx-lm makes a smaller copy of an unquantised model only"),
    ],
)
def test_the_advice_names_a_command_or_says_why_not(shape: ModelShape, said: str) -> None:
    first, *rest = advise_copy("org/Llama", shape, CHIPS["M4 Max"])
    assert first.startswith(said)
    assert bool(rest) == first.endswith("--mlx-path Llama-4bit -q --q-bits 4")
    assert not rest or rest[0].startswith("Then give --drafter Llama-4bit: predicted 1.")


def _models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The bundled model by the name of another, and a smaller file beside it in 4 bits."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    model, copy = folder / "Tiny", folder / "Tiny-4bit"
    for one in (copy, model):
        shutil.copytree(find_bundled("target"), one)
    config = json.loads((copy / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64}
    (copy / "config.json").write_text(json.dumps(config))
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"0")
    return model, copy


def test_auto_offers_the_copy_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, copy = _models(tmp_path, monkeypatch)
    search, chip = DrafterSearch.of(str(model)), CHIPS["M4 Pro"]
    half_written = shutil.copytree(copy, tmp_path / "Tiny-8bit")
    (half_written / "model.safetensors").unlink()
    assert find_copy(search, chip) is None, "a model of a few megabytes"
    slow = replace(chip, bandwidth=0.1)
    found = find_copy(search, slow)
    assert found is not None
    assert found.path == str(copy)
    assert found.reason.startswith("a copy of the model in 4 bits; predicted 1.")

    for one, is_offered in ((slow, True), (chip, False), (None, False)):
        monkeypatch.setattr("mlx_redrafter.bench.machine.this_chip", lambda one=one: one)
        chosen = choose_drafter(str(model), "auto", yes=False)
        assert chosen == (str(copy) if is_offered else "lookup")
        assert (found.reason in capsys.readouterr().err) == is_offered
        assert choose_drafter(str(model), None, yes=False) == "lookup", "only if asked for"


def test_advice_on_a_model_tells_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    _models(tmp_path, monkeypatch)
    llama = tmp_path / "llama"
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps(LLAMA_8B))
    told = cli("advise", llama, "--chip", "M4 Pro").out
    assert f"convert --hf-path {llama} --mlx-path {llama}-4bit -q --q-bits 4" in told
    told = cli("advise", tmp_path / "Tiny", "--chip", "M4 Pro").out
    assert "A smaller copy of the model as its drafter\n  It would not pay: predicted 0." in told
    monkeypatch.setitem(CHIPS, "M4 Pro", replace(CHIPS["M4 Pro"], bandwidth=0.1))
    told = cli("advise", tmp_path / "Tiny", "--chip", "M4 Pro").out
    assert f"--model {tmp_path / 'Tiny'} --drafter {tmp_path / 'Tiny-4bit'} --prompt" in told
    assert "Tiny-4bit (a copy of the model in 4 bits; predicted 1." in told
    (llama / "config.json").write_text(json.dumps({**LLAMA_8B, **WINDOWED}))
    assert "smaller copy" not in cli("advise", llama, "--chip", "M4 Pro").out

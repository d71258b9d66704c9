"""`redrafter-mlx advise`: what is known of a model, and sentences that follow from it.

At the end, a smaller copy of the model as its drafter: offered and advised if it is predicted to
pay.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from mlx_redrafter.bench import forecast
from mlx_redrafter.bench.advice import Subject, advise, find_subject, recommend
from mlx_redrafter.bench.chips import CHIPS
from mlx_redrafter.bench.forecast import Forecast, predict_forecast
from mlx_redrafter.bench.model_shape import shape_of_config
from mlx_redrafter.bench.smaller_copy import advise_copy, find_copy, predict_gain
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch
from mlx_redrafter.cli.model_options import choose_drafter
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.duration import Pace
from tests.helpers.models import change_config

# From the config.json of Llama-3.1-8B.
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip
# Its sizes in 4 bits.
SHAPE = shape_of_config("llama", {**LLAMA_8B, "quantization": {"bits": 4, "group_size": 64}})
MIXTRAL = {
    **{**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000},
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a config alone."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def test_the_shape_of_a_config_is_that_of_the_published_model():
    found = shape_of_config("x", {**LLAMA_8B, "quantization": {"bits": 6, "group_size": 64}})
    assert found.parameters == found.active == pytest.approx(8.03e9, rel=1e-3)
    assert (found.hidden_size, found.vocab_size) == (4096, 128256)
    assert found.bits in (4, 8)
    assert shape_of_config("x", LLAMA_8B).bits == 16


def test_a_token_reads_the_chosen_experts_only():
    shape = shape_of_config("x", MIXTRAL)
    assert shape.parameters == pytest.approx(46.7e9, rel=0.01)
    assert shape.active == pytest.approx(12.9e9, rel=0.01)


def test_damaged_configs_are_named():
    for change, message in (
        ({"hidden_size": "wide"}, "hidden_size 'wide', expected an integer"),
        ({"num_hidden_layers": None}, "mlx-lm cannot make x from its config"),
    ):
        with pytest.raises(CheckpointError, match=message):
            shape_of_config("x", {**LLAMA_8B, **change})


def test_models_are_found_by_what_they_are(tmp_path):
    assert find_subject(None).is_bundled
    target = find_bundled("target")
    assert find_subject(str(target)).folder == target
    shutil.copy(target / "config.json", tmp_path)
    assert find_subject(str(tmp_path)).folder is None, "no weights, nothing to measure"
    for name in ("nobody/nothing", "llama 8B"):
        with pytest.raises(CheckpointError, match=r"nobody/nothing|no such folder"):
            find_subject(name)


def test_a_drafter_at_hand_fits_or_not(llama):
    drafter = str(find_bundled("drafter"))
    fits, foreign = find_subject(None, drafter), find_subject(str(llama), drafter)
    assert fits.usable_drafter == drafter
    assert foreign.usable_drafter is None
    assert "does not match the target's" in (foreign.refusal or "")
    assert find_subject(None, "lookup").drafter is None


def _forecast(subject: Subject, chip: str) -> Forecast:
    cost = TrainingCost.of(subject.shape, 10**6)
    return predict_forecast(subject.shape, CHIPS[chip], cost, subject.simulated)


def _advice(chip: str, trial: float | None = None, drafter: str | None = None) -> dict[str, str]:
    subject = Subject("MODEL", SHAPE, None) if drafter is None else find_subject(None, drafter)
    predicted = _forecast(subject, chip)
    sections = advise(subject, predicted, recommend(subject, predicted, trial))
    return {headline: "\n".join(sentences) for headline, sentences in sections.items()}


@pytest.mark.parametrize(
    ("stated", "gain"),
    [
        ({"length": 5, "tokens_per_step": 2.5}, r"1\.3\d times .*; predicted for chains of 4"),
        ({"length": 5, "tokens_per_step": 1.05}, "Gain: 1.00 times .*; predicted, as chains of 4"),
        ({"length": 5, "tokens_per_step": 6.0}, "Gain: unknown"),
        ({"length": "5", "tokens_per_step": 2.5}, "Gain: unknown"),
        ([5, 2.5], "Gain: unknown"),
    ],
)
def test_a_trained_drafters_gain_is_predicted(tmp_path, stated, gain):
    config = {**read_config(find_bundled("drafter")), "simulated": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject = Subject("MODEL", SHAPE, None, drafter=str(tmp_path))
    assert re.search(gain, recommend(subject, _forecast(subject, "M4"), None).gain)


def test_training_is_recommended_where_drafting_pays():
    slow, fast = _advice("M1"), _advice("M4")
    for sections, advice in ((slow, "Do not train one"), (fast, "Train one if")):
        assert "PREDICTION" in "".join(sections.values())
        training = sections["No drafter was found: training one"]
        assert training.startswith(advice)
        assert "redrafter-mlx train --model MODEL --data TEXTS --tokens 1000000" in training
        command, gain, *_ = sections["Recommended"].splitlines()
        assert command == 'redrafter-mlx generate --model MODEL --drafter lookup --prompt "..."'
        assert gain == "Gain: unknown; it depends on how much a text repeats."


def test_limits_are_those_of_the_chip_and_the_model():
    limits = {chip: _advice(chip)["When drafting will not pay"] for chip in ("M2", "M3")}
    assert "M1 and M2 read weights in 4 bits once per draft" in limits["M2"]
    assert "M1 and M2" not in limits["M3"]
    experts = {**MIXTRAL, "num_local_experts": 32}
    for config, is_sparse in ((experts, True), (LLAMA_8B, False)):
        subject = Subject("x", shape_of_config("x", config), None)
        found = " ".join(recommend(subject, _forecast(subject, "M4"), None).limits)
        assert ("experts" in found) == is_sparse


def test_what_was_tried_decides():
    drafter = str(find_bundled("drafter"))
    gained = _advice("M1", 1.4, drafter)["Recommended"]
    assert 'redrafter-mlx generate --prompt "..."' in gained  # uses the bundled drafter
    assert "The drafter is on this machine: the one in this package." in gained
    assert "Gain: 1.40 times as fast as plain decoding; measured here" in gained
    lost = _advice("M1", 0.9, drafter)["Recommended"]
    assert "generate --drafter lookup" in lost
    assert "0.90 times as fast here: leave it out" in lost
    assert "`redrafter-mlx try` measures it" in _advice("M1", None, drafter)["Recommended"]


def test_the_pair_is_tried(cli, no_timing, monkeypatch):
    monkeypatch.setattr(forecast, "TRIAL_TOKENS", 8)
    result = cli("advise", "--tokens", "50K")
    assert result.code == 0
    assert "Measured here, in plain steps: a pass over 4 tokens costs" in result.out
    assert result.out.startswith("Recommended\n  redrafter-mlx generate")
    is_used = "measured here on three short texts" in result.out
    assert is_used or "The bundled drafter is" in result.out  # where other work slows it down
    assert "No drafter was found" not in result.out
    assert "32 bits" in result.out
    assert result.err.startswith("loading the model")


def test_training_is_rehearsed_only_if_its_time_is_told(cli, no_timing, monkeypatch):
    rehearse = Mock(return_value=Pace(1e-3, 1e-3, 1.0, 1e-3, 1e-3))
    monkeypatch.setattr(forecast, "rehearse", rehearse)
    monkeypatch.setattr(forecast, "try_drafter", lambda *_: 1.2)
    lookup = ("advise", "--drafter", "lookup", "--tokens", "50K")
    told = cli(*lookup)
    assert "On 50,000 tokens: about " in told.out
    assert "rehearsing the training of a drafter, to know its time; --no-rehearsal" in told.err
    assert rehearse.call_count == 1
    untold = cli(*lookup, "--no-rehearsal")
    assert "Command: redrafter-mlx train" in untold.out
    assert "On 50,000 tokens" not in untold.out
    assert json.loads(cli("advise", "--json").out)["training"]["seconds"] is None, "has a drafter"
    assert "rehearsing" not in untold.err
    assert rehearse.call_count == 1


def test_another_chip_is_told_nothing_of_this_machine(cli):
    result = cli("advise", "--chip", "M1 Max")
    assert result.code == 0
    assert "this machine has" not in result.out
    assert "for this machine" not in result.out
    result = cli("advise", find_bundled("drafter"))
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "is a drafter; give it with --drafter" in result.err


def test_answers_without_a_machine(cli, tmp_path, llama):
    result = cli("advise", llama, "--chip", "m2 pro")
    assert result.code == 0
    assert "Forecast for M2 Pro" in result.out
    config = {**read_config(find_bundled("target")), "model_type": "rwkv7"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = cli("advise", tmp_path)
    assert refused.code == 1
    assert refused.out.startswith("Not supported: model_type 'rwkv7'")
    for arguments in (("advise", llama, "--chip", "M9"), ("advise", "x", "--tokens", "many")):
        wrong = cli(*arguments)
        assert wrong.code == 2
        assert wrong.err.count("\n") == 1
    none = cli("advise", llama, "--drafter", "none")
    assert (none.code, none.err.count("\n")) == (2, 1)
    assert "expected a drafter, found --drafter none" in none.err


def test_an_unknown_machine(cli, monkeypatch, llama):
    monkeypatch.setattr("mlx_redrafter.bench.machine.processor_name", lambda: "Other CPU")
    result = cli("advise", llama)
    assert result.code == 2
    assert "no figures are known for this machine (Other CPU); say --chip" in result.err
    assert "or give a model's folder" in result.err
    several = cli("advise", "--machines", 2)
    assert several.err.endswith("this machine (Other CPU); say --chip 'M2 Pro'\n")
    monkeypatch.setattr("mlx_redrafter.bench.machine.processor_name", lambda: "Apple M4 Pro")
    assert "Forecast for M4 Pro" in cli("advise", llama).out


def test_the_forecast_is_of_the_question():
    subject = Subject("MODEL", SHAPE, None)
    small, large = (_forecast(subject, chip) for chip in ("M4 Pro", "M4 Max"))
    assert small.plain == pytest.approx(2 * large.plain, rel=0.01)
    assert small.training
    assert large.training
    assert small.training.total > large.training.total


# A smaller copy of the model as its drafter

# Every second layer of this Llama attends to the newest tokens only.
WINDOWED = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
LLAMA = shape_of_config("llama", LLAMA_8B)


def test_a_copy_pays_where_reading_the_weights_takes_the_time():
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
def test_the_advice_names_a_command_or_says_why_not(shape, said):
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
    change_config(copy, quantization={"bits": 4, "group_size": 64})
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"0")
    return model, copy


def test_auto_offers_the_copy_where_it_pays(tmp_path, monkeypatch, capsys):
    model, copy = _models(tmp_path, monkeypatch)
    search, chip = DrafterSearch.of(str(model)), CHIPS["M4 Pro"]
    half_written = shutil.copytree(copy, tmp_path / "Tiny-8bit")
    (half_written / "model.safetensors").unlink()
    assert find_copy(search, chip) is None, "a model of a few megabytes"
    slow = replace(chip, bandwidth=0.1)
    found = find_copy(search, slow)
    assert found.path == str(copy)
    assert found.reason.startswith("a copy of the model in 4 bits; predicted 1.")

    for one, is_offered in ((slow, True), (chip, False), (None, False)):
        monkeypatch.setattr("mlx_redrafter.bench.machine.this_chip", lambda one=one: one)
        chosen = choose_drafter(str(model), "auto", yes=False)
        assert chosen == (str(copy) if is_offered else "lookup")
        assert (found.reason in capsys.readouterr().err) == is_offered
        assert choose_drafter(str(model), None, yes=False) == "lookup", "only if asked for"


def test_advice_names_a_copy(tmp_path, llama, monkeypatch, cli):
    _models(tmp_path, monkeypatch)
    told = cli("advise", llama, "--chip", "M4 Pro").out
    assert f"convert --hf-path {llama} --mlx-path {llama}-4bit -q --q-bits 4" in told
    told = cli("advise", tmp_path / "Tiny", "--chip", "M4 Pro").out
    assert "A smaller copy of the model as its drafter\n  It would not pay: predicted 0." in told
    monkeypatch.setitem(CHIPS, "M4 Pro", replace(CHIPS["M4 Pro"], bandwidth=0.1))
    told = cli("advise", tmp_path / "Tiny", "--chip", "M4 Pro").out
    assert f"--model {tmp_path / 'Tiny'} --drafter {tmp_path / 'Tiny-4bit'} --prompt" in told
    assert "Tiny-4bit (a copy of the model in 4 bits; predicted 1." in told
    change_config(llama, **WINDOWED)
    assert "smaller copy" not in cli("advise", llama, "--chip", "M4 Pro").out

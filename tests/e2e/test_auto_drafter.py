"""`--drafter auto` on a fake hub: found, asked for, downloaded, used; offline the second time."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_redrafter import Drafter, Lookup, load
from tests.helpers.cli import Cli, Result
from tests.helpers.fake_hub import FakeHub

MODEL = "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"
# In the table after a drafter that this hub does not have.
DRAFTER = "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3"
# In the table for another model, whose name is the beginning of this one's.
UNRELATED = "RedHatAI/Qwen3-30B-A3B-speculator.dflash"

# Config of a model that is supported.
LLAMA = '{"model_type": "llama"}'


@pytest.fixture
def hub(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with three repositories, and nothing on this machine."""
    hub = FakeHub()
    hub.add(MODEL, untouched / "model", license="apache-2.0")
    hub.add(DRAFTER, untouched / "drafter", license="mit")
    hub.add(UNRELATED, untouched / "drafter")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub.serving():
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def _generate(cli: Cli, *options: str) -> Result:
    arguments = ("generate", "--model", MODEL, "--prompt", "Once", "-m", "8", "--json")
    return cli(*arguments, *options)


def _line(result: Result, code: int) -> str:
    """The one line about a command that fails."""
    assert (result.code, result.err.count("\n")) == (code, 1), result.err
    return result.err


def _tokens(result: Result) -> list[int]:
    tokens: list[int] = json.loads(result.done().out)["tokens"]
    return tokens


def test_a_newcomer_finds_a_drafter(hub, cli, monkeypatch):
    plain = _generate(cli, "--drafter", "none", "--yes")
    assert "drafter:" not in plain.err

    asked = _generate(cli, "--drafter", "auto")
    assert f"--yes would download {DRAFTER} (EAGLE-3, " in asked.err
    assert "licence mit" in asked.err
    assert f"drafter: prompt lookup; none on this machine is made for {MODEL}" in asked.err
    assert isinstance(load(MODEL, "auto")[2], Lookup)
    assert f"{DRAFTER}/model.safetensors" not in hub.fetched, "only when asked to"

    drafted = _generate(cli, "--drafter", "auto", "--yes")
    assert f"drafter: {DRAFTER} (EAGLE-3; made for Qwen/" in drafted.err
    assert _tokens(plain) == _tokens(asked) == _tokens(drafted)
    assert not any(name.startswith(UNRELATED) for name in hub.fetched)

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fetched = list(hub.fetched)
    for options in ((), ("--drafter", "auto")):
        again = _generate(cli, *options)
        assert f"drafter: {DRAFTER}" in again.err
        assert _tokens(again) == _tokens(plain)
    assert isinstance(load(MODEL, "auto")[2], Drafter)
    assert hub.fetched == fetched, "nothing is fetched twice"


def test_a_name_alone_runs(hub, cli):
    name = MODEL.partition("/")[2]
    asked = _line(cli("run", name, "Once"), 2)
    assert f"Download {MODEL} (" in asked
    assert hub.fetched == [f"{MODEL}/config.json"], "which says whether the model is supported"
    first = cli("run", name, "Once", "--yes", "-m", "8").done()
    assert f"drafter: {DRAFTER} (" in first.err
    fetched = list(hub.fetched)
    again = cli("run", name, "Once", "-m", "8")
    assert (again.code, again.out) == (0, first.out)
    assert hub.fetched == fetched
    missing = _line(cli("run", "nothing", "Once"), 1)
    assert "no 'mlx-community/nothing' on this machine or on the hub; check the name" in missing


@pytest.mark.parametrize(
    ("names", "config", "remedy"),
    [
        ("model-Q4_K_M.gguf config.json", LLAMA, "found GGUF files; use a copy in MLX's"),
        ("pytorch_model.bin config.json", LLAMA, "found PyTorch's weights; use a copy in"),
        ("adapters.safetensors adapter_config.json", "{}", "found an adapter; "),
        ("unet.safetensors", "", "safetensors of another format"),
        ("README.md", "", "is it a checkpoint folder?"),
        ("model.safetensors config.json", '{"model_type": "bert"}', "'bert' cannot be"),
    ],
)
def test_a_repository_that_is_no_model_is_one_line(hub, cli, tmp_path, names, config, remedy):
    (tmp_path / "other").mkdir()
    for name in names.split():
        (tmp_path / "other" / name).write_text(config if name.endswith(".json") else "")
    hub.add("org/other", tmp_path / "other")
    for arguments in (("run", "org/other", "Once", "--yes"), ("chat", "--model", "org/other")):
        assert remedy in _line(cli(*arguments), 1)
    assert not any(name.endswith("model.safetensors") for name in hub.fetched)


def test_a_wrong_name_and_a_gate_are_one_line(hub, cli):
    refused = _line(cli("run", MODEL.replace("Qwen3", "Qven3"), "Once", "--yes"), 1)
    assert f"did you mean {MODEL}?" in refused
    missing = _generate(cli, "--drafter", f"{MODEL}-drafter", "--yes")
    assert f"there is no '{MODEL}-drafter' on this machine or on the hub; " in missing.err
    assert f"did you mean {MODEL}?" not in missing.err
    hub.add("org/gated", hub.folders[MODEL], gated="manual")
    refused = _line(cli("run", "org/gated", "Once", "--yes"), 1)
    assert f"accept the terms at {hub.address}/org/gated, then run `hf auth login`" in refused
    drafter = cli("run", DRAFTER, "Once", "--yes")
    assert f"{DRAFTER} is a drafter; give it with --drafter" in drafter.err


@contextmanager
def _declining() -> Iterator[list[str]]:
    """Let a terminal decline every question; yield the questions."""
    questions: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for stream in (sys.stdin, sys.stderr):
            patch.setattr(stream, "isatty", lambda: True)
        confirm = "mlx_redrafter.cli.names.typer.confirm"
        patch.setattr(confirm, lambda text, err: bool(questions.append(text)))
        yield questions


def test_a_terminal_is_asked(hub, cli):
    _generate(cli, "--drafter", "none", "--yes")
    with _declining() as questions:
        declined = _generate(cli, "--drafter", "auto")
    assert questions[0].startswith(f"Download {DRAFTER} (EAGLE-3, ")
    assert "drafter: prompt lookup" in declined.err


def test_a_named_drafter_needs_a_question(hub, cli, tmp_path):
    _generate(cli, "--drafter", "none", "--yes")
    texts = tmp_path / "texts.txt"
    texts.write_text("Once upon a time.\n")
    train = ("train", "--model", MODEL, "--data", texts, "--out", tmp_path / "out")
    hub.add("org/small", hub.folders[MODEL])
    compare = ("bench", "compare", "--model", MODEL, "--prompts", texts)
    asked = _line(cli(*compare, "--stock-draft-model", "org/small"), 2)
    assert "Download org/small (" in asked
    for words in (
        ("generate", "--model", MODEL, "--prompt", "Once", "--drafter", DRAFTER),
        ("serve", "--model", MODEL, "--drafter", DRAFTER, "--port", "0"),
        (*train, "--start-from", DRAFTER),
    ):
        asked = _line(cli(*words), 2)
        assert f"Download {DRAFTER} (" in asked
        assert "licence mit)? There is no terminal to ask at: add --yes" in asked
    assert not any(name.startswith(DRAFTER) for name in hub.fetched)
    assert _tokens(_generate(cli, "--drafter", DRAFTER, "--yes"))
    assert _tokens(_generate(cli, "--drafter", DRAFTER)), "it is here now"


def test_the_target_of_a_conversion_is_not_downloaded_without_a_question(
    hub, cli, untouched, tmp_path
):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("mine")
    words = ("convert", untouched / "drafter", tmp_path / "new", "--target", MODEL)
    assert f"Download {MODEL} (" in _line(cli(*words), 2)
    refused = _line(cli(*words[:2], tmp_path / "others", *words[3:], "--yes"), 2)
    assert "thesis.txt in" in refused
    assert f"{MODEL}/model.safetensors" not in hub.fetched
    result = cli(*words, "--yes")
    assert (result.code, f" by {MODEL}" in result.out) == (0, True), result.err


def test_a_licence_cannot_change_the_question(hub, cli):
    """Signs that move the cursor would let a repository write over its size."""
    hub.add(MODEL, hub.folders[MODEL], license="\x1b[2K\rDownload one kilobyte")
    with _declining() as questions:
        assert _generate(cli, "--drafter", "none").code == 1
    assert "licence \\x1b[2K Download one kilobyte)?" in questions[0]
    pulled = cli("pull", MODEL)
    hub.add(DRAFTER, hub.folders[DRAFTER], license="\x1b[2Kmit")
    asked = _generate(cli, "--drafter", "auto")
    assert "licence \\x1b[2Kmit" in asked.err
    told = cli("advise", MODEL, "--chip", "M4 Pro")
    for result in (pulled, asked, told):
        assert "\x1b" not in result.out + result.err


def test_a_damaged_drafter_is_replaced_by_lookup(hub, cli, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(hub.folders[DRAFTER], damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    hub.add(DRAFTER, damaged)
    for options in (("--drafter", "auto", "--yes"), ()):
        result = _generate(cli, *options).done()
        assert "drafter: prompt lookup" in result.err
    assert "Traceback" not in result.err


def test_a_too_large_model(hub, cli, monkeypatch):
    _generate(cli, "--drafter", "none", "--yes")
    memory = "mlx_redrafter.checkpoints.memory_check.read_total_memory"
    monkeypatch.setattr(memory, lambda: 10**5)
    refused = _line(_generate(cli, "--drafter", "lookup"), 1)
    assert refused.startswith("error: the model needs about ")
    disk = "mlx_redrafter.hub.shutil.disk_usage"
    monkeypatch.setattr(disk, lambda _: shutil._ntuple_diskusage(1, 0, 1))
    full = cli("pull", DRAFTER)
    assert (full.code, full.err.count("\n")) == (1, 3), full.err
    assert "of disk in" in full.err


def test_lookup_drafts_offline(hub, cli, monkeypatch):
    _generate(cli, "--drafter", "none", "--yes")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = _generate(cli, "--drafter", "auto").done()
    assert "on the Hugging Face Hub" in result.err
    assert result.err.count("\n") == 2, result.err


def test_advice_names_the_drafter_and_whose_figure_its_gain_is(hub, cli):
    arguments = ("advise", MODEL, "--chip", "M4 Pro")
    told = cli(*arguments)
    assert f"It downloads {DRAFTER} (EAGLE-3, " in told.out
    assert "Not used: RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash is no" in told.out
    command = f'redrafter-mlx generate --model {MODEL} --drafter auto --yes --prompt "..."'
    assert told.out.startswith(f"Recommended\n  {command}\n  Gain: unknown; nobody has published")
    advice = json.loads(cli(*arguments, "--json").out)
    assert advice["command"] == command
    assert advice["drafter"]["licence"] == "mit"
    assert advice["drafter"]["stored"] is False
    assert advice["gain"]["speedup"] is None
    assert not any(name.endswith("safetensors") for name in hub.fetched)

    hub.add("mlx-community/Qwen3-8B-4bit", hub.folders[MODEL])
    hub.add("RedHatAI/Qwen3-8B-speculator.eagle3", hub.folders[DRAFTER])
    other = cli("advise", "mlx-community/Qwen3-8B-4bit", "--json", *arguments[2:])
    source = "measured by others (GPUs, Red Hat's article of 19 November 2025)"
    assert json.loads(other.out)["gain"] == {"speedup": "1.5 to 2.5", "source": source}


def test_models_are_listed_pulled_and_removed(hub, cli, tmp_path):
    listed = cli("list").err
    assert "no models in MLX's format on this machine" in listed
    (bundled,) = re.findall("whose names --drafter takes: (.*)", listed)
    assert "kind: recurrent drafter" in cli("show", bundled).out
    pulled = cli("pull", MODEL.partition("/")[2])
    assert pulled.err.startswith(f"looking for '{MODEL}' on the hub ..."), "the owner is completed"
    assert f"\ndownloading {MODEL} (" in pulled.err
    assert "licence apache-2.0" in pulled.err
    assert f"\n{MODEL} is in " in pulled.err, "not on the line of a progress bar"
    offered = "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash (DFlash, to download)"
    assert f"drafter: {offered}" in pulled.err
    again = cli("pull", MODEL)
    assert f"\nchecking the files of {MODEL} (" in again.err
    assert cli("pull", DRAFTER).code == 0
    rows = json.loads(cli("list", "--json").out)["models"]
    assert {row["name"]: row["kind"] for row in rows} == {
        MODEL: "model", DRAFTER: "recurrent drafter",
    }  # fmt: skip
    assert rows[0]["drafter"] == f"{DRAFTER} (EAGLE-3, on this machine)"
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in hub.folders[MODEL].iterdir())

    asked = _line(cli("rm", DRAFTER), 2)
    assert "add --yes" in asked
    kept, moved = tmp_path / "hub" / f"models--{DRAFTER.replace('/', '--')}", tmp_path / "moved"
    kept.rename(moved)
    kept.symlink_to(moved)
    assert f"delete {kept} and, if" in _line(cli("rm", DRAFTER, "--yes"), 1)
    kept.unlink()
    moved.rename(kept)
    assert cli("rm", DRAFTER.lower(), "--yes").code == 0
    shutil.copytree(hub.folders[MODEL], tmp_path / ".lmstudio" / "models" / "org" / "kept")
    for name, error in (("org/kept", "LM Studio keeps it"), (DRAFTER, "is not in the Hugging")):
        assert error in _line(cli("rm", name, "--yes"), 1)
    hub.add("org/kept", hub.folders[MODEL])
    assert "\ndownloading org/kept (" in cli("pull", "org/kept").err, "a copy of LM Studio's"
    assert "no 'nobody/nothing' on" in cli("pull", "nobody/nothing").err

"""Nothing of the user's is written over: every command that writes refuses it before any work."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.training.files import remove_leftovers
from tests.e2e.test_hostile import nothing_changes

TEXT = "Once upon a time there were two little cats in a big house.\n\n" * 4


@pytest.fixture
def home(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a drafter, texts, and other names of them."""
    for name in ("model", "drafter"):
        shutil.copytree(untouched / name, tmp_path / name)
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "broken").symlink_to("nothing")
    shutil.copytree(tmp_path / "model", tmp_path / "hard", copy_function=os.link)
    for name in ("foreign", "with data", "maps", "lint"):
        (tmp_path / name).mkdir()
    (tmp_path / "lint" / ".eslintrc.json").write_text("{}")
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    maps = ("maps/sweep.json", "maps/speedup-best-nodes-greedy.png")
    for name in ("texts.txt", "with data/texts.txt", "p.png", *maps):
        (tmp_path / name).write_text(TEXT)
    os.link(tmp_path / "texts.txt", tmp_path / "hard.txt")
    (tmp_path / "other.json").write_text(json.dumps({"kind": "other"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


INPUT = "found what this call reads"
OTHERS = "add --overwrite"
# Model, out and further options of a training run; the reason for which it is refused.
TRAINING = [
    (["model", "--out", "model"], INPUT),
    (["model", "--out", "./model/", "--dry-run"], INPUT),
    (["model", "--out", "nothing/../model"], INPUT),
    (["model", "--out", "link"], INPUT),
    (["link", "--out", "model", "--dry-run"], INPUT),
    (["model", "--out", "hard"], OTHERS),
    (["model", "--out", "drafter", "--start-from", "drafter"], INPUT),
    (["model", "--out", "foreign"], OTHERS),
    (["model", "--out", "foreign", "--dry-run"], OTHERS),
    (["model", "--out", "lint"], OTHERS),
    (["model", "--out", "."], INPUT),
    (["model", "--out", "texts.txt"], "found a file"),
    (["model", "--out", "broken"], "found a broken link"),
    (["model", "--out", "new", "--cache", "model"], INPUT),
    (["model", "--out", "new", "--cache", "foreign"], OTHERS),
    (["model", "--out", "new/drafter", "--cache", "new"], "does not hold --out, found new"),
    (["model", "--out", "with data", "--data", "with data/texts.txt"], INPUT),
    (["model", "--out", "link", "--overwrite"], INPUT),
    (["model", "--out", "foreign", "--resume"], OTHERS),
    (["model", "--out", "/proc/drafter"], "/proc/drafter"),  # takes no file from anybody
]
# Out and further options of a conversion, for which the same function checks the paths.
CONVERSION = [
    (["drafter"], INPUT),
    (["nothing/../drafter", "--to", "pytorch"], INPUT),
    (["model"], OTHERS),
    (["foreign", "--to", "pytorch"], OTHERS),
    # Python hands over bytes that are not UTF-8 as such signs.
    (["new\udcff"], "new\\udcff'; rename it, or choose another"),
]
# Command, prompts, out and further options of a measurement.
MEASUREMENT = [
    (["speed", "texts.txt", "texts.txt"], OTHERS),
    (["throughput", "texts.txt", "broken"], "found a broken link"),
    (["compare", "texts.txt", "hard.txt", "--overwrite"], INPUT),
    (["throughput", "texts.txt", "model/config.json", "--overwrite"], INPUT),
    *(([name, "p.png", "p.json"], INPUT) for name in ("speed", "compare", "throughput")),
    (["speed", "p.png", "p.json", "--overwrite"], INPUT),
    (["throughput", "texts.txt", "other.json", "--resume"], "expected a result of"),
    (["speed", "texts.txt", "."], "found a folder"),
    # The out of a sweep is a folder.
    (["sweep", "maps/sweep.json", "maps"], OTHERS),
    (["sweep", "maps/sweep.json", "maps", "--overwrite"], INPUT),
    (["sweep", "texts.txt", "maps", "--resume"], "cannot read"),
    (["sweep", "maps/speedup-best-nodes-greedy.png", "maps", "--overwrite"], INPUT),
]
REFUSED = [
    *((["train", "--data", "texts.txt", "--model", *words], why) for words, why in TRAINING),
    *((["convert", "drafter", *words], why) for words, why in CONVERSION),
    *(
        (["bench", name, "--model", "model", "--prompts", prompts, "--out", *out], why)
        for (name, prompts, *out), why in MEASUREMENT
    ),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=lambda one: " ".join(one))
def test_what_is_of_others_is_refused(home, cli, words, reason):
    with nothing_changes(home):
        found = cli(*words)
    assert found.code in (1, 2)
    assert len(found.err.splitlines()) == 1
    assert reason in found.err


def test_training_that_continues_nothing_says_so(home, cli):
    found = cli("train", "--out", "new", "--resume")
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert "no run was begun in new" in found.err
    begun = ("--model", "model", "--data", "texts.txt", "--tokens", 1000, "--dry-run")
    found = cli("train", "--out", "new", "--resume", *begun)
    assert found.err.startswith("no run was begun in new; this one begins at its first step\n")


def test_leftovers_of_a_killed_run_are_told_from_files_of_others(tmp_path):
    names = (".eslintrc.json", ".markdown.md", "state/.previous.safetensors")
    (tmp_path / "state").mkdir()
    for name in names:
        (tmp_path / name).write_text("mine")

    def end(temporary: Path) -> None:
        shutil.copy(temporary, temporary.with_name(f"{temporary.stem[:-8]}leftover.json"))

    write_atomically(tmp_path / "state" / "run.json", end)  # leaves a copy, as a killed run would
    assert len([*(tmp_path / "state").iterdir()]) == 3
    remove_leftovers(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    assert len([*(tmp_path / "state").iterdir()]) == 2


def test_overwriting_keeps_other_files(home, cli):
    cli("convert", "drafter", "foreign", "--to", "pytorch", "--overwrite").done()
    names = {path.name for path in (home / "foreign").iterdir()}
    assert names == {"thesis.txt", "config.json", "model.safetensors"}
    assert (home / "foreign" / "thesis.txt").read_text() == "mine"


def test_a_page_replaces_pages_alone(home, cli, monkeypatch):
    monkeypatch.setattr("mlx_redrafter.bench.speed.time_shapes", lambda *_: None)
    prompts = ["--prompts", "texts.txt", "--num-prompts", 1, "--batch-sizes", 1, "--temps", 0]
    brief = ["-m", 8, "--repeats", 1, "--model", "model", "--out", "r.json"]
    cli("bench", "speed", *prompts, *brief).done()
    for _ in range(2):
        cli("bench", "share", "r.json", "-o", "page.md").done()
    own = Path("page.md").read_text()
    Path("above.md").write_text(f"# My diary\n\n{own}")
    Path("below.md").write_text(f"{own}\nMy notes.\n")
    unfinished = json.loads(Path("r.json").read_text())
    del unfinished["disturbances"]
    Path("u.json").write_text(json.dumps(unfinished))
    Path("u.md").write_text("My notes.\n")
    with nothing_changes(home):
        found = cli("bench", "speed", *prompts, *brief[:-1], "u.json", "--resume")
        assert (found.code, OTHERS in found.err) == (2, True)
        refused = [(f"{name}.md", OTHERS) for name in ("above", "below")]
        refused += [("texts.txt", OTHERS), ("r.json", INPUT), ("r.json --overwrite", INPUT)]
        for out, why in refused:
            found = cli("bench", "share", "r.json", "-o", *out.split())
            assert found.code == 2
            assert why in found.err

"""Nothing of the user's is written over: every command that writes refuses it before any work."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.helpers.cli import run

TEXT = "Once upon a time there were two little cats in a big house.\n\n" * 4


def _hashes(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder, by their paths; links are followed."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def home(
    stories: Trained, drafter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a model, a drafter, texts, and other names of them."""
    shutil.copytree(stories.folder, tmp_path / "model")
    shutil.copytree(drafter_folder, tmp_path / "drafter")
    (tmp_path / "texts.txt").write_text(TEXT)
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "broken").symlink_to("nothing")
    shutil.copytree(tmp_path / "model", tmp_path / "hard", copy_function=os.link)
    os.link(tmp_path / "texts.txt", tmp_path / "hard.txt")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    (tmp_path / "with data").mkdir()
    (tmp_path / "with data" / "texts.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


INPUT = "found what this call reads"
OTHERS = "add --overwrite"
# Model, out and further options of a training run; the reason for which it is refused.
REFUSED = [
    (["--model", "model", "--out", "model"], INPUT),
    (["--model", "model", "--out", "./model/"], INPUT),
    (["--model", "model", "--out", "foreign/../model"], INPUT),
    (["--model", "model", "--out", "nothing/../model"], INPUT),
    (["--model", "model", "--out", "link"], INPUT),
    (["--model", "link", "--out", "model"], INPUT),
    (["--model", "model", "--out", "hard"], OTHERS),
    (["--model", "model", "--out", "drafter", "--start-from", "drafter"], INPUT),
    (["--model", "model", "--out", "foreign"], OTHERS),
    (["--model", "model", "--out", "."], INPUT),
    (["--model", "model", "--out", "texts.txt"], "found a file"),
    (["--model", "model", "--out", "broken"], "found a broken link"),
    (["--model", "model", "--out", "new", "--cache", "model"], INPUT),
    (["--model", "model", "--out", "new", "--cache", "foreign"], OTHERS),
    (["--model", "model", "--out", "with data", "--data", "with data/texts.txt"], INPUT),
    (["--model", "model", "--out", "model", "--overwrite"], INPUT),
    (["--model", "model", "--out", "link", "--overwrite"], INPUT),
    (["--model", "model", "--out", "foreign", "--resume"], OTHERS),
]


@pytest.mark.parametrize("is_dry", [False, True], ids=["run", "dry run"])
@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=lambda one: " ".join(one[2:]))
def test_training_refuses_folders_of_others(
    home: Path, capsys: pytest.CaptureFixture[str], options: list[str], reason: str, is_dry: bool
) -> None:
    before = _hashes(home)
    dry = ["--dry-run"] if is_dry else []
    found = run(capsys, "train", "--data", "texts.txt", "--tokens", 1000, *options, *dry)
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert reason in found.err
    assert _hashes(home) == before


def test_training_that_continues_nothing_says_so(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "train", "--out", "new", "--resume")
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert "no run was begun in new" in found.err
    begun = ("--model", "model", "--data", "texts.txt", "--tokens", 1000, "--dry-run")
    found = run(capsys, "train", "--out", "new", "--resume", *begun)
    assert found.err.startswith("no run was begun in new; this one begins at its first step\n")


def _convert(home: Path, out: str, *options: str) -> list[str]:
    return ["convert", "drafter", out, *options]


def _export(home: Path, out: str, *options: str) -> list[str]:
    return ["convert", "drafter", out, "--to", "pytorch", *options]


@pytest.mark.parametrize("command", [_convert, _export], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("drafter", INPUT),
        ("nothing/../drafter", INPUT),
        ("model", OTHERS),
        ("link", OTHERS),
        ("hard", OTHERS),
        ("foreign", OTHERS),
        (".", INPUT),
        ("texts.txt", "found a file"),
        ("broken", "found a broken link"),
    ],
)
def test_conversion_refuses_folders_of_others(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    command: Callable[..., list[str]],
    out: str,
    reason: str,
) -> None:
    before = _hashes(home)
    found = run(capsys, *command(home, out))
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert reason in found.err
    assert _hashes(home) == before


def test_overwriting_keeps_other_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *_export(home, "foreign", "--overwrite")).code == 0
    names = {path.name for path in (home / "foreign").iterdir()}
    assert names == {"thesis.txt", "config.json", "model.safetensors"}
    assert (home / "foreign" / "thesis.txt").read_text() == "mine"


# Prompts, out and further options of a measurement; the reason for which it is refused.
RESULTS = [
    ("texts.txt", "texts.txt", OTHERS),
    ("texts.txt", "model/config.json", OTHERS),
    ("texts.txt", "broken", "found a broken link"),
    ("texts.txt", "texts.txt --overwrite", INPUT),
    ("texts.txt", "hard.txt --overwrite", INPUT),
    ("texts.txt", "model/config.json --overwrite", INPUT),
    ("p.png", "p.json", INPUT),
    ("p.png", "p.json --overwrite", INPUT),
    ("texts.txt", "other.json --resume", "expected a result of"),
]
# The same for a sweep, whose out is a folder.
MAPS = [
    ("maps/sweep.json", "maps", OTHERS),
    ("maps/sweep.json", "maps --overwrite", INPUT),
    ("texts.txt", "maps", OTHERS),
    ("texts.txt", "maps --resume", "cannot read"),
    ("maps/speedup-best-nodes-greedy.png", "maps --overwrite", INPUT),
]
MEASUREMENTS = [
    *((name, *one) for name in ("speed", "compare", "throughput") for one in RESULTS),
    *(("sweep", *one) for one in MAPS),
]


@pytest.mark.parametrize(("command", "prompts", "out", "reason"), MEASUREMENTS)
def test_measurements_refuse_files_of_others(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    prompts: str,
    out: str,
    reason: str,
) -> None:
    (home / "maps").mkdir()
    for name in ("p.png", "maps/sweep.json", "maps/speedup-best-nodes-greedy.png"):
        (home / name).write_text(TEXT)
    (home / "other.json").write_text(json.dumps({"kind": "other"}))
    before = _hashes(home)
    arguments = ["--prompts", prompts, "--model", "model", "--out", *out.split()]
    found = run(capsys, "bench", command, *arguments)
    assert found.code in (1, 2)
    assert len(found.err.splitlines()) == 1
    assert reason in found.err
    assert _hashes(home) == before


def test_a_page_replaces_pages_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompts", "texts.txt", "--num-prompts", 1, "--batch-sizes", 1, "--temps", 0]
    brief = ["-m", 8, "--repeats", 1, "--model", "model", "--out", "r.json"]
    assert run(capsys, "bench", "speed", *prompts, *brief).code == 0
    for _ in range(2):
        assert run(capsys, "bench", "share", "r.json", "-o", "page.md").code == 0
    before = _hashes(home)
    for out, reason in (("texts.txt", OTHERS), ("r.json", INPUT), ("r.json --overwrite", INPUT)):
        found = run(capsys, "bench", "share", "r.json", "-o", *out.split())
        assert found.code == 2
        assert reason in found.err
    assert _hashes(home) == before


def test_a_place_that_takes_no_file_is_told_at_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of the system, which takes no file from anybody."""
    found = run(
        capsys, "train", "--model", "model", "--data", "texts.txt", "--out", "/proc/drafter"
    )
    assert (found.code, len(found.err.splitlines())) == (1, 1)
    assert "/proc/drafter" in found.err

"""Real pairs: all methods write the same text, slow shapes leave, and results are kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.bench.lab.real_pairs import SHAPES, run


@pytest.fixture
def pairs(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # restored after the test
    for folder in folders:
        shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / "prompts.txt").write_text("\n\n".join(["abc", "hello", "there", "once", "more"]))
    known = {"target": "target", "drafter": "drafter", "prompts": "prompts.txt"}
    path = tmp_path / "pairs.json"
    path.write_text(
        json.dumps([{"name": "gone", **known, "drafter": "no"}, {"name": "a", **known}])
    )
    return path


def test_results_are_kept_and_slow_shapes_leave(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_timing: None
) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"texts": 5, "tokens": 6}
    run(pairs, out, [0.0, 1.0], 5.0, [], **options)
    shown = capsys.readouterr().out
    assert "gone: FAILED" in shown
    files = sorted(out.glob("*.json"))
    assert [path.name for path in files] == ["a-0.json", "a-1.json"]
    speeds = json.loads(files[0].read_text())["speeds"]
    assert [len(one) - 2 for one in speeds] == [len(SHAPES)] * 2 + [len(SHAPES) // 2] * 2 + [2]
    before = [path.read_text() for path in files]
    run(pairs, out, [0.0, 1.0], 5.0, ["a"], **options)
    assert [path.read_text() for path in files] == before
    assert shown.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]

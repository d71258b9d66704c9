"""Real pairs: all methods write the same text, slow shapes leave, and results are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.bench.lab.altered_drafters import CHANGES
from mlx_redrafter.bench.lab.real_pairs import SHAPES, run
from mlx_redrafter.proposers.redrafter.network import Drafter


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
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "4 bits"])
def test_a_change_changes_what_a_drafter_says(
    name: str, pair: tuple[Any, Drafter], folders: tuple[Path, Path]
) -> None:
    config = pair[1].config
    drafter = Drafter(config)
    drafter.update(pair[1].parameters())
    hidden, state = mx.random.normal((2, config.hidden_size), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    CHANGES[name](drafter)
    after = drafter.log_probs(hidden, state[None])
    assert not mx.allclose(before, after).item()
    spread = (mx.std(after) / mx.std(before)).item()
    low, high = {"flat": (0.0, 0.5), "sharp": (2.0, 4.0), "noisy": (0.8, 1.3)}[name]
    assert low < spread < high

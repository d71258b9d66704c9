"""Measurements of the laboratory on a pair small enough for a test."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter import load
from mlx_redrafter.bench.lab import beside_mlx_dspark, first_texts, memory, real_pairs
from mlx_redrafter.bench.lab.memory import Peaks, measure_memory
from mlx_redrafter.bench.runs import (
    PLAIN,
    CommonSettings,
    EncodedPrompt,
    Turn,
    drafted_arm,
    plain_arm,
)
from mlx_redrafter.bench.turns import one_by_one
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.block import load as load_block
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import random_drafter

pytestmark = pytest.mark.usefixtures("no_timing")


def test_every_method_has_a_row_for_each_temperature(folders, tasks, tmp_path, run_lab):
    model, drafter = folders
    out = tmp_path / "methods.json"
    given = "--model", model, "--drafter", f"{drafter}=1x4,beam:2x3", "--drafter", "lookup"
    options = "--prompts", tasks, "--per-task", 1, "--temps", "0,1", "-m", 6, "--out", out
    printed = run_lab("methods", *given, *options)
    name = drafter.name
    methods = ["mlx-lm", "plain", f"{name}, top_n w1 l4 n4", f"{name}, beam w2 l3", f"{name}, auto"]
    methods.append("lookup, auto")
    rows = json.loads(out.read_text())["rows"]
    assert [(row["setting"], row["arm"]) for row in rows] == [
        (temp, method) for temp in ("T 0", "T 1") for method in methods
    ]
    assert all(row["num_texts"] == 2 and not row["num_different"] for row in rows)
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:1] == "|"]
    begin = ["method", "tokens/step", "times mlx-lm", "interval"]
    assert cells[0] == [*begin, "coding", "qa", "different"]
    assert [line[0] for line in cells if line[0] in methods] == methods * 2
    assert [f"{done} of 4 questions" in printed for done in range(5)] == [True] * 5
    with pytest.raises(ConfigError, match="resume it"):
        run_lab("methods", *given, *options)
    with pytest.raises(ConfigError, match="two drafters are called"):
        run_lab("methods", *given, "--drafter", f"{drafter}=1x3", "--prompts", tasks)


def test_verified_nodes_are_counted(folders):
    settings = CommonSettings(*load(*folders), max_tokens=9)
    turn = Turn("g", 0, EncodedPrompt("p", "c", [5, 6]), 0)
    ((plain, _),) = one_by_one(PLAIN, plain_arm(settings), [turn])
    assert plain.num_verified == plain.steps == len(plain.tokens) - 1
    ((drafted, _),) = one_by_one("w", drafted_arm(settings, DraftPlan.of(1, 3)), [turn])
    # At the end nothing is left to draft.
    assert drafted.steps < drafted.num_verified <= 3 * drafted.steps


def test_bounds_hold(monkeypatch, pair):
    monkeypatch.setattr(memory, "LARGE", 2**25)
    findings = measure_memory(*pair, DraftPlan.of(), prompt_tokens=600)
    # Beside weights this small, the logits of a tree are large.
    names = ("peak of the prefill", "K/V")
    checked = [finding for finding in findings if finding.name.startswith(names)]
    assert len(findings) == 6
    assert len(checked) == 2
    assert not [finding for finding in checked if not finding.holds]


def test_rows_beyond_one_block_break_the_bound(pair):
    stock = Peaks(10, 10, [256, 256, 512])
    _, drafter = pair
    for rows, holds in (([512, 512, 768], True), ([512, 768, 768], False)):
        found = memory._compare(stock, Peaks(10, 10, rows), drafter, DraftPlan.of())[-1]
        assert found.unit == "rows"
        assert found.holds is holds


@pytest.fixture
def pairs(folders, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # restored after the test
    for script in (real_pairs, first_texts):
        monkeypatch.setattr(script, "WARM_UP", 2)
    for folder in folders:
        shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / "prompts.txt").write_text("\n\n".join(["abc", "hello", "there", "once", "more"]))
    known = {"target": "target", "drafter": "drafter", "prompts": "prompts.txt"}
    path = tmp_path / "pairs.json"
    given = {"name": "gone", **known, "drafter": "no"}, {"name": "a", **known}
    path.write_text(json.dumps(given))
    return path


def test_real_pairs_keep_results_and_slow_shapes_leave(pairs, tmp_path, capsys):
    out, options = tmp_path / "out", {"texts": 5, "tokens": 6}
    real_pairs.run(pairs, out, [0.0, 1.0], 5.0, [], **options)
    shown = capsys.readouterr().out
    assert "gone: FAILED" in shown
    files = sorted(out.glob("*.json"))
    assert [path.name for path in files] == ["a-0.json", "a-1.json"]
    speeds = json.loads(files[0].read_text())["speeds"]
    most = len(real_pairs.SHAPES)
    assert [len(one) - 2 for one in speeds] == [most, most, most // 2, most // 2, 2]
    before = [path.read_text() for path in files]
    real_pairs.run(pairs, out, [0.0, 1.0], 5.0, ["a"], **options)
    assert [path.read_text() for path in files] == before
    assert shown.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


def test_the_first_text_of_a_process(pairs):
    pair = json.loads(pairs.read_text())[1]
    first_texts.learn(pair, pairs.parent, 0.0, 6)
    speeds = first_texts.measure(pair, pairs.parent, 0.0, 6, 1)
    assert speeds.keys() > {"plain", "default"}
    assert len(speeds) == 2 + len(real_pairs.SHAPES)
    found = first_texts.summarise([{"plain": 2.0, "default": 3.0, "a": 4.0, "b": 1.0}])
    assert found.startswith("1.50 of plain (1.50 to 1.50); 0.75 of a (0.75 to 0.75); a has 2.00")


def test_a_block_drafter_as_deepspec_publishes_it(tmp_path):
    plain: dict[str, Any] = {"windows": (None, None), "causal": (False, False)}
    config = block_config(67, 32, **LINKS["vanilla"], **plain, has_confidence=True)
    drafter = random_block(config)
    beside_mlx_dspark.export(drafter, tmp_path)
    found = load_block(tmp_path)
    assert_same_weights(found, drafter)
    names = (*beside_mlx_dspark.SAME, "captured_layers", "head_dim", "link", "rank", "first_slot")
    for name in names:
        assert getattr(found.config, name) == getattr(config, name)
    for other in (random_block(block_config(67, 32, **LINKS["vanilla"])), random_drafter(67, 32)):
        with pytest.raises(ConfigError, match="expected a drafter that"):
            beside_mlx_dspark.export(other, tmp_path)

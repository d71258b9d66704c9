"""The commands of `redrafter-mlx bench` and of the laboratory, end to end on a tiny pair."""

import json
import re
import sys
from functools import partial

import pytest

from mlx_redrafter.bench import speed
from mlx_redrafter.bench.lab.commands.tables import fill
from mlx_redrafter.bench.plots import _groups, plot_speed
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row
from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt, Turn
from mlx_redrafter.bench.sweep import Grid, Point
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.bench.turns import Interleaving, decode_in_turns
from mlx_redrafter.cli.bench import GridOptions
from mlx_redrafter.cli.bench_output import parse_count, parse_ints, parse_shapes, parse_temps
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, ConfigError
from tests.bench.test_report import make_run
from tests.helpers.calls import at_call
from tests.helpers.models import shared_path

pytestmark = pytest.mark.usefixtures("no_timing")


@pytest.mark.parametrize(("temp", "beam"), [(0, "top_n w4 l5 n9"), (0.9, "beam w4 l5")])
def test_compare(folders, prompts, tmp_path, bench, temp, beam):
    out = tmp_path / "c.json"
    options = ["--model", folders[0], "--drafter", folders[1], "--prompts", prompts, "-m", 4]
    options += ["--temp", temp, "--repeats", 1 if temp else 2, "-o", out]
    options += [] if temp else ["--stock-draft-model", folders[0]]
    printed = bench("compare", *options)
    assert beam in printed.out
    result = json.loads(out.read_text())
    assert all(line in printed.err for line in result["disturbances"])
    # A sampled text of stock mlx-lm has another random state.
    rows = {row["arm"]: row["num_different"] for row in result["rows"]}
    assert rows["auto"] == rows[beam] == 0
    assert temp or set(rows.values()) == {0}
    assert temp or len(result["runs"]) == 6 * 2 * 2
    bench("compare", *options, "--resume")
    assert len(json.loads(out.read_text())["runs"]) == len(result["runs"])


@pytest.mark.parametrize("command", ["speed", "compare", "sweep", "throughput"])
def test_a_prompt_that_is_too_long_is_named(folders, tmp_path, bench, command):
    prompts = tmp_path / "p.txt"
    prompts.write_text("abc\n\n" + "abc " * 2000)
    options = ("--model", folders[0], "--drafter", folders[1], "--prompts", prompts)
    found = bench(command, *options, "--out", tmp_path / "out").err
    assert re.search(r"prompt 2 of .*p\.txt: the prompt has \d+ tokens, the ", found)


def test_sweep(folders, tmp_path, bench, monkeypatch):
    target, drafter = folders
    prompts, out = tmp_path / "p.jsonl", tmp_path / "sweep"
    prompts.write_text('{"turns": ["abc"], "category": "x", "question_id": 3}\n')
    options = (
        "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 4, "-o", out,
        "--widths", "1-2", "--lengths", "2-3", "--repeats", 1, "--temps", "0,0.8",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install '.[plot]'" in bench("sweep", *options).err
    result = json.loads((out / "sweep.json").read_text())
    assert len(result["points"]) == 2 * 8
    assert {point["row"]["num_different"] for point in result["points"]} == {0}
    pytest.importorskip("matplotlib")
    bench("sweep", *options, "--resume")
    assert len(list(out.glob("*.png"))) == 2 * 2


def test_lists_and_counts():
    assert [parse_count(text) for text in ("12", "0.2B", "5 K")] == [12, 2 * 10**8, 5000]
    assert parse_ints("1,2, 4-6,5") == (1, 2, 4, 5, 6)
    assert parse_temps("0,0.7,0.70,0") == (0, 0.7)
    beam = DraftPlan.of(4, 5, select="beam")
    expected = [DraftPlan.of(1, 5), DraftPlan.of(4, 5, 9), beam]
    assert parse_shapes("1x5, 4x5x9,beam:4x5,4x5") == expected
    assert GridOptions(selections="beam, top_n,beam").read().selections == ("beam", "top_n")
    for parse, texts, message in (
        (parse_count, ("", "-1", "2G", "1.2.3M", "0", "0.5", "9" * 400), "expected a number"),
        (parse_ints, ("", "0", "3-2", "a", "1,,2"), "expected numbers"),
        (parse_ints, ("1-99999999", "1-600,601-1200"), "at most 1000 numbers"),
        (parse_temps, ("", "a", "0,,1"), "expected temperatures"),
        (parse_temps, ("-1", "0,nan", "inf", "1e7"), "temp must be a number from 0 to 1e"),
        (parse_shapes, ("", "4", "4x5x9x2", "tree:4x5"), "expected draft shapes"),
        (lambda text: GridOptions(selections=text).read(), ("beam,c",), "of top_n, beam, got 'c'"),
    ):
        for text in texts:
            with pytest.raises(ConfigError, match=message):
                parse(text)


def test_validation_of_the_prediction(run_lab):
    sweeps = shared_path("data/apple_sweeps")
    assert "median error of step time" in run_lab("validate", sweeps)


def test_every_method_after_a_power_cut(folders, prompts, tmp_path, bench, monkeypatch):
    target, drafter = folders
    out = tmp_path / "t.json"
    options = (
        "throughput", "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 6,
        "--batch-sizes", "1,3", "--shapes", "2x3", "--rounds", 1, "-o", out,
    )  # fmt: skip

    def break_down(settings, batch):
        if len(batch) == 3:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        at_call(patch, speed, "_decode_by_stock", break_down)
        with pytest.raises(RuntimeError, match="power cut"):
            bench(*options)
    before = json.loads(out.read_text())["runs"]
    assert {one["group"] for one in before} == {"T 0, batch 1"}
    bench(*options, "--resume")
    result = json.loads(out.read_text())
    assert result["kind"] == "throughput"
    assert result["runs"][: len(before)] == before
    rows = [(row["batch_size"], row["arm"]) for row in result["rows"]]
    assert len(set(rows)) == len(rows) == 8
    for row in result["rows"]:
        assert row["num_different"] == 0
        assert row["tokens_per_second"]["median"] > 0
        assert row["arm"] != "mlx-lm" or row["speedup"]["median"] == 1


def test_a_table_has_a_column_for_each_number_of_texts():
    medians = {"tokens_per_second": {"median": 100.0}, "speedup": {"median": 1.25}}
    result = {
        **{"kind": "throughput", "commit": "0123456789", "configuration": {"temp": 0.0}},
        **{"disturbances": [], "rows": [{"arm": "auto", "batch_size": 2, **medians}]},
    }
    page = fill("<!-- table: throughput -->\n<!-- end -->", {"x": result})
    assert "| x | 0123456 | 0 | auto |  | 100 (1.25) |  |  |  | yes |" in page


# Grids, what survives an interruption, and what plots show


def test_grid_leaves_out_what_cannot_be():
    # Of width 1 one per length, of width 2 two, and four of beams.
    plans = Grid((1, 2), (2, 3), (None, 7)).plans
    assert DraftPlan.of(2, 3, 7) in plans
    assert DraftPlan.of(2, 3, select="beam") in plans
    assert len(plans) == len(set(plans)) == 10
    with pytest.raises(ConfigError, match="fewer nodes"):
        Grid((1,), (2,), (9,), ("top_n",))
    with pytest.raises(ConfigError, match="at most 1000 shapes, got 1024"):
        Grid(tuple(range(1, 65)), tuple(range(2, 18)), selections=("top_n",))


def test_recordings_go_on(tmp_path):
    path, runs = tmp_path / "r.json", [make_run("a", 1.0, repeat=repeat) for repeat in range(2)]
    first = Recording(path, "sweep", {"seed": 1})
    first.add(runs[:1])
    second = Recording(path, "sweep", {"seed": 1}, resume=True)
    assert second.runs == runs[:1]
    assert second.has(("g", 0, "p", 0))
    assert not second.has(("g", 0, "p", 1))
    second.add(runs[1:])
    third = Recording(path, "sweep", {"seed": 1}, resume=True)
    assert third.runs == runs
    assert len(third.result["sittings"]) == 3
    with pytest.raises(ConfigError, match="measured with seed 1, now it is 2"):
        Recording(path, "sweep", {"seed": 2}, resume=True)
    whole = path.read_text()
    path.write_text(whole.replace('"num_verified"', '"num_plain"'))
    with pytest.raises(ConfigError, match="another version of this program"):
        Recording(path, "sweep", {"seed": 1}, resume=True)
    machine = json.loads(whole)["machine"]
    path.write_text(whole.replace(json.dumps(machine["processor"]), '"M1"', 1))
    with pytest.raises(ConfigError, match="measured with processor 'M1', now it is"):
        Recording(path, "sweep", {"seed": 1}, resume=True)
    for part in ('"runs"', '"versions"', '"sittings"', '"machine"'):
        path.write_text(whole.replace(part, '"lost"'))
        with pytest.raises(CheckpointError, match="is damaged"):
            Recording(path, "sweep", {"seed": 1}, resume=True)


def test_every_round_starts_with_another_method():
    """The rounds may share anything else, such as the block of a sweep's shapes."""
    order = []

    def make_methods(settings):
        def decode(name, batch):
            order.append(name)
            measured = {"prompt_seconds": 1.0, "decode_seconds": 1.0, "tokens": [1, 2]}
            return [(turn.run(name, **measured), "") for turn in batch]

        return {name: partial(decode, name) for name in "abc"}

    prompts = [EncodedPrompt(name, "", [1]) for name in "pqr"]
    batches = [[Turn("g", 0, prompt, repeat)] for repeat in range(2) for prompt in prompts]
    settings = CommonSettings(None, None, None, max_tokens=2)
    recording = Recording(None, "sweep", {})
    decode_in_turns([Interleaving(make_methods, settings, batches)], recording)
    warm_up, rounds = order[:3], order[3:]
    assert warm_up == ["a", "b", "c"]
    assert "".join(rounds[::3]) == "abcbca"
    assert [run.arm for run in recording.runs] == 6 * ["a", "b", "c"]


def test_texts_of_one_token_have_a_plot(tmp_path):
    """They have no speed, and warnings are errors here."""
    pytest.importorskip("matplotlib")
    assert plot_speed(tmp_path / "p.png", [], "bundled").exists()


def point(width, length, nodes=None, select="top_n", speed=1.0, tokens=1.0, temp=0.0):
    row = Row("", estimate([speed]), None, None, tokens, [], None, 0, 0, 1)
    return Point(temp, DraftPlan.of(width, length, nodes, select), row)


def test_maps_have_all_shapes_of_one_number_of_nodes():
    points = [point(w, n, min(w * n, 9)) for w in (1, 2, 3) for n in (2, 3)]
    points += [point(2, 3, select="beam"), point(2, 3, 6, temp=0.5)]
    names = "best nodes, greedy", "merged beams, greedy", "best nodes, temperature 0.5"
    assert _sizes(points) == dict(zip(names, (6, 1, 1), strict=True))
    points = [point(4, 5, 8), point(4, 5, 16), point(4, 4, 8)]
    names = "best nodes, 8 nodes, greedy", "best nodes, 16 nodes, greedy"
    assert _sizes(points) == dict(zip(names, (2, 1), strict=True))


def _sizes(points):
    return {name: len(group) for name, group in _groups(points).items()}

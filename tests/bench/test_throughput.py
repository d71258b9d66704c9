"""Several texts at once: the command, and texts that are the target's own."""

import json

import pytest

from mlx_redrafter.bench import throughput
from mlx_redrafter.bench.lab.tables import fill
from tests.bench.commands import PROMPTS, run


def test_every_way_with_several_texts(folders, tmp_path):
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "t.json"
    prompts.write_text(PROMPTS)
    run(
        "throughput", "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 6,
        "--batch-sizes", "3", "--shapes", "2x3", "--rounds", 1, "-o", out,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["kind"] == "throughput"
    ways = [(one["batch_size"], one["way"]) for one in result["found"]]
    assert len(set(ways)) == len(ways) == 4
    for one in result["found"]:
        assert one["num_different"] == (None if one["way"] == "mlx-lm" else 0)
        assert one["throughput"]["median"] > 0


def test_sizes_that_are_measured_are_kept(folders, tmp_path, monkeypatch):
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "t.json"
    prompts.write_text(PROMPTS)
    stock_way = throughput._stock_method

    def break_down(setting):
        write = stock_way(setting)

        def way(ids):
            if len(ids) == 2:
                raise RuntimeError("power cut")
            return write(ids)

        return way

    monkeypatch.setattr(throughput, "_stock_method", break_down)
    with pytest.raises(RuntimeError, match="power cut"):
        run(
            "throughput", "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 4,
            "--batch-sizes", "1,2", "--shapes", "2x3", "--rounds", 1, "-o", out,
        )  # fmt: skip
    assert {one["batch_size"] for one in json.loads(out.read_text())["found"]} == {1}


@pytest.mark.parametrize(("table", "cell"), [("throughput", "100 (1.25)"), ("latency", "20.0")])
def test_tables_have_a_column_for_each_number_of_texts(table, cell):
    one = {
        "way": "auto",
        "batch_size": 2,
        "throughput": {"median": 100.0},
        "latency": {"median": 0.02},
        "speedup": {"median": 1.25},
    }
    result = {
        "kind": "throughput",
        "commit": "0123456789",
        "configuration": {"temp": 0.0},
        "disturbances": [],
        "found": [one],
    }
    page = fill(f"<!-- table: {table} -->\n<!-- end -->", {"x": result})
    assert f"| x | 0123456 | 0 | auto |  | {cell} |  |  |  | yes |" in page

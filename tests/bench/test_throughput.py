"""Several texts at once: the command, and texts that are the target's own."""

import json

import pytest

from mlx_redrafter.bench import speed
from mlx_redrafter.bench.lab.commands.tables import fill
from tests.bench.commands import run


def test_every_method_with_several_texts_and_after_a_power_cut(
    folders, prompts, tmp_path, monkeypatch
):
    target, drafter = folders
    out = tmp_path / "t.json"
    options = (
        "throughput", "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 6,
        "--batch-sizes", "1,3", "--shapes", "2x3", "--rounds", 1, "-o", out,
    )  # fmt: skip
    decode = speed._decode_by_stock

    def break_down(settings, batch):
        if len(batch) == 3:
            raise RuntimeError("power cut")
        return decode(settings, batch)

    with monkeypatch.context() as patch:
        patch.setattr(speed, "_decode_by_stock", break_down)
        with pytest.raises(RuntimeError, match="power cut"):
            run(*options)
    before = json.loads(out.read_text())["runs"]
    assert {one["group"] for one in before} == {"T 0, batch 1"}
    run(*options, "--resume")
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

"""Several texts at once: the command, and texts that are the target's own."""

import json

from tests.bench.test_bench_cli import PROMPTS, run


def test_every_way_with_several_texts(folders, tmp_path):
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "t.json"
    prompts.write_text(PROMPTS)
    run(
        "throughput", "--model", target, "--drafter", drafter, "--prompts", prompts, "-m", 6,
        "--batch-sizes", "3", "--widths", 2, "--beam-length", 3, "--rounds", 1, "-o", out,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["kind"] == "throughput"
    ways = [(one["batch_size"], one["way"]) for one in result["found"]]
    assert len(set(ways)) == len(ways) == 4
    for one in result["found"]:
        assert one["num_different"] == (None if one["way"] == "mlx-lm" else 0)
        assert one["throughput"]["median"] > 0

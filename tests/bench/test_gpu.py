"""The comparison for GPUs, on the CPU."""

import json

from tests.bench.commands import run_lab


def test_rows_and_runs_of_both_temperatures(folders, tmp_path):
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "gpu.json"
    prompts.write_text("abc abc\n\ndef def")
    options = ("--model", target, "--drafter", drafter, "--prompts", prompts, "-o", out)
    text = run_lab("gpu", *options, "-m", 8, "--repeats", 1)
    assert text.count("no pass compiled") == text.count("top_n w4 l5 n16") == 2
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2 * 2 * 6
    for group in ("temperature 0", "temperature 1"):
        texts = {
            (run["prompt"], *run["tokens"])
            for run in runs
            if run["group"] == group and run["arm"] != "mlx-lm"
        }
        assert len(texts) == 2

"""Benchmarks of a request's beginning and of texts that repeat their prompt."""

import json
from dataclasses import replace

import mlx_redrafter
from mlx_redrafter.bench.lab.copying import LOOKUP, compare_copies, make_copies
from mlx_redrafter.bench.lab.request import WARM_UP, measure_request
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import AUTO, PLAIN, STOCK, CommonSettings
from tests.bench.commands import run_lab


def test_request_times_what_begins_a_text(folders, tmp_path):
    target, drafter = folders
    out = tmp_path / "request.json"
    text = run_lab("request", "--model", target, "--drafter", drafter, "--rounds", 3, "-o", out)
    assert "Engine.stream" in text
    result = json.loads(out.read_text())
    assert set(result["found"]) == {"Engine.stream", "stream_generate", "Engine"}
    assert all(0 < found["median"] < 10 for found in result["found"].values())
    assert result["configuration"]["tensors"] == 20


def test_request_begins_no_text_of_the_caller(folders):
    model, tokenizer, drafter = mlx_redrafter.load(*map(str, folders))
    done = []
    found = measure_request(
        model, tokenizer, drafter, [1, 2], 2, lambda *progress: done.append(progress)
    )
    assert done[-1] == (2 + WARM_UP, 2 + WARM_UP)
    assert found["Engine"].median > 0


def test_copies_are_edited_and_written_out(tmp_path):
    model, tokenizer, drafter = mlx_redrafter.load()
    copies = make_copies(tokenizer)
    for copy in copies:
        assert copy.prompt.ids != copy.answer
        assert len(set(copy.answer) - set(copy.prompt.ids)) < len(copy.answer) / 4
    short = [
        replace(copy, prompt=replace(copy.prompt, ids=copy.prompt.ids[:120])) for copy in copies
    ]
    setting = CommonSettings(model, tokenizer, drafter, 60)
    recording = Recording(tmp_path / "copy.json", "copy", {}, False)
    found = compare_copies(setting, short, 1, recording)
    for rows in found.values():
        by_arm = {row.arm: row for row in rows}
        assert set(by_arm) == {STOCK, PLAIN, LOOKUP, AUTO}
        assert not any(row.num_different for row in rows)
        assert by_arm[LOOKUP].tokens_per_step > 1.5

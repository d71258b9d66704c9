"""The memory benchmark finds what it should, on a pair small enough for a test."""

from mlx_redrafter.bench.lab import memory
from mlx_redrafter.bench.lab.memory import Peaks, measure_memory
from mlx_redrafter.draft_plan import DraftPlan


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

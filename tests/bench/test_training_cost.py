"""The computed cost of training: what it depends on, and the table in the documentation."""

from mlx_redrafter.bench.chips import CHIPS
from mlx_redrafter.bench.lab.commands.training import TABLE_CHIPS, shape_of
from mlx_redrafter.bench.training_cost import TrainingCost
from tests.bench.commands import run_lab
from tests.helpers.models import ROOT


def test_the_table_in_the_documentation_is_what_the_command_gives() -> None:
    table = run_lab("training").strip()
    assert table in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    head, _, *rows = table.splitlines()
    assert all(chip in head for chip in TABLE_CHIPS)
    assert len(rows) == 6


def test_the_cost_grows_with_the_model_and_the_tokens() -> None:
    chip, totals = CHIPS["M1"], []
    for model in ("llama 1B", "llama 8B"):
        shape = shape_of(model, 4)
        once, twice = (TrainingCost.of(shape, tokens) for tokens in (10**6, 2 * 10**6))
        totals.append(once.predict(shape, chip).total)
        assert 1.7 < twice.predict(shape, chip).total / totals[-1] < 2.1
        assert twice.needed.cache > 1.9 * once.needed.cache
        assert twice.needed.drafter == once.needed.drafter
    assert totals == sorted(totals)


def test_the_stages_follow_from_the_hardware() -> None:
    shape = shape_of("llama 8B", 16)
    cost = TrainingCost.of(shape, 10**6)
    stages = cost.predict(shape, CHIPS["M2 Max"]).stages
    assert set(stages) == {"reading", "generating", "training", "evaluation"}
    # Reading is arithmetic: two operations per parameter and token, at best.
    least = cost.work.given * 2 * shape.parameters / (CHIPS["M2 Max"].teraflops * 1e12)
    assert least < stages["reading"] < 2 * least
    assert least < stages["generating"] < 2 * least * cost.work.tokens / cost.work.given

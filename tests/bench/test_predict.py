"""The cost model: theory where nothing is known, measurements where there are some."""

from dataclasses import astuple
from statistics import median

import pytest

from mlx_redrafter.bench.chips import CHIPS, CURVES, find_chip, find_curve
from mlx_redrafter.bench.cost_model import (
    APPLE_ACCEPTANCE,
    FITTED,
    Parameters,
    Question,
    ShapeAcceptance,
    assumptions,
    predict,
)
from mlx_redrafter.bench.lab import validation
from mlx_redrafter.bench.lab.commands.training import TABLE_CHIPS, shape_of
from mlx_redrafter.bench.lab.validation import fit, read_apple_sweeps
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.errors import CheckpointError, ConfigError
from tests.helpers.models import ROOT, shared_path

SWEEPS = "data/apple_sweeps"
SIZES = ((1, 2), (2, 3), (3, 5), (4, 4), (4, 5))


def make_steps() -> list[tuple[Question, float, int]]:
    return [
        (Question(CHIPS[name], 6.74e9, 16, 0.06 * 6.74e9, plain), width * length, length)
        for name, plain in (("M1 Max", 47.0), ("M2", 158.0), ("M2 Ultra", 25.0))
        for width, length in SIZES
    ]


def test_fit_finds_what_made_the_times():
    true = Parameters(1.08, 3.0, 1.2, 1.3, 30.0)
    times = [question.step_time(*sizes, true) for question, *sizes in make_steps()]
    found = fit(make_steps(), times)
    for (question, *sizes), time in zip(make_steps(), times, strict=True):
        assert question.step_time(*sizes, found) == pytest.approx(time, rel=0.05)
    # Even where plain steps take longer than drafted ones, no parameter is negative.
    found = fit(make_steps(), [0.5 * question.plain_step for question, *_ in make_steps()])
    assert min(astuple(found)) >= 0


def test_two_chips_predict_the_third():
    found = validation.leave_one_out(read_apple_sweeps(shared_path(SWEEPS)))
    assert [one.chip for one in found] == ["M1 Max", "M2", "M2 Ultra"]
    assert [len(one.errors) for one in found] == [128, 128, 64]
    assert max(one.median_error for one in found) < 0.15
    assert median(abs(error) for one in found for error in one.errors) < 0.10
    assert min(best.share for one in found for best in one.best) >= 0.95


def test_committed_numbers_are_those_of_the_sweeps():
    rows = read_apple_sweeps(shared_path(SWEEPS))
    assert astuple(FITTED) == pytest.approx(astuple(validation.fit_all(rows)), rel=1e-3)
    acceptance = validation.tokens_per_step(rows, ("float16", True))
    for one in APPLE_ACCEPTANCE:
        shape = int(one.tokens) // one.length, one.length
        assert one.tokens_per_step == pytest.approx(acceptance[shape], abs=0.006)


def test_prediction_is_the_best_and_says_what_it_rests_on():
    question = Question(find_chip("apple m2 ultra"), 6.74e9, 16, 4e8)
    speedups = dict(predict(question, [one]) for one in APPLE_ACCEPTANCE)
    name, speedup = predict(question, APPLE_ACCEPTANCE)
    assert speedups[name] == speedup == max(speedups.values())
    assert 20 < question.plain_step < 30
    text = " ".join(assumptions(question))
    assert "cost model fitted" in text
    assert "75%" in text
    measured = Question(CHIPS["M5 Max"], 27e9, 4, 1e9, plain=30.7)
    shapes = [ShapeAcceptance(4, 4, 2.5, "chain"), ShapeAcceptance(8, 57, 3.0, "too large")]
    assert predict(measured, shapes)[0] == "chain"


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="m1-max"):
        read_apple_sweeps(tmp_path)
    with pytest.raises(ConfigError, match="expected a chip out of M1"):
        find_chip("M9")
    with pytest.raises(ConfigError, match="smaller shapes"):
        predict(Question(CHIPS["M1"], 7e9, 4, 4e8), [ShapeAcceptance(8, 57, 3.0, "x")])


def test_curves_start_at_one_and_are_interpolated():
    for curve in CURVES:
        assert curve.ratios[1] == 1
        assert curve.chip in CHIPS
        assert list(curve.ratios) == sorted(curve.ratios)
    curve = find_curve(CHIPS["M3 Max"], 4)
    assert curve.at(6) == pytest.approx((1.28 + 2.5) / 2)
    assert curve.at(33) is None


@pytest.mark.parametrize(
    ("name", "bits", "nearest"),
    [("M3 Ultra", 4, "M3 Ultra"), ("M4", 8, "M4 Pro"), ("M1 Ultra", 8, "M1 Ultra, converted")],
)
def test_the_nearest_chip_stands_for_one_without_figures(name, bits, nearest):
    question = Question(CHIPS[name], 8e9, bits, 4e8)
    assert question.curve.chip == nearest.removesuffix(", converted")
    (note,) = (n for n in assumptions(question) if "verify(T)/verify(1)" in n)
    assert note.startswith("WARNING") == (name != nearest)


def test_the_roofline_stands_where_no_chip_has_figures():
    question = Question(CHIPS["M3"], 8e9, 16, 0.0)
    assert question.curve is None
    assert "WARNING" in assumptions(question)[1]
    assert "roofline" in assumptions(question)[1]
    few, many = (
        question.plain_step / predict(question, [ShapeAcceptance(2, tokens, 1.0, "x")])[1]
        - FITTED.fixed
        for tokens in (2, 4000)
    )
    assert few == pytest.approx(question.plain_step), "reading the weights hides the arithmetic"
    teraflops = CHIPS["M3"].teraflops
    assert many == pytest.approx(4000 * 2 * 8e9 / (teraflops * 1e9))


def test_every_chip_has_a_prediction():
    for chip in CHIPS.values():
        for bits in (16, 8, 4):
            assert predict(Question(chip, 8e9, bits, 4e8), APPLE_ACCEPTANCE)


# Training


def test_the_table_in_the_documentation_is_what_the_command_gives(run_lab):
    table = run_lab("training").strip()
    assert table in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    head, _, *rows = table.splitlines()
    assert all(chip in head for chip in TABLE_CHIPS)
    assert len(rows) == 6


def test_the_cost_grows_with_the_model_and_the_tokens():
    chip, totals = CHIPS["M1"], []
    for model in ("llama 1B", "llama 8B"):
        shape = shape_of(model, 4)
        once, twice = (TrainingCost.of(shape, tokens) for tokens in (10**6, 2 * 10**6))
        totals.append(once.predict(shape, chip).total)
        assert 1.7 < twice.predict(shape, chip).total / totals[-1] < 2.1
        assert twice.needed.cache > 1.9 * once.needed.cache
        assert twice.needed.drafter == once.needed.drafter
    assert totals == sorted(totals)


def test_the_stages_follow_from_the_hardware():
    shape = shape_of("llama 8B", 16)
    cost = TrainingCost.of(shape, 10**6)
    stages = cost.predict(shape, CHIPS["M2 Max"]).stages
    assert set(stages) == {"reading", "generating", "training", "evaluation"}
    # Reading is arithmetic: two operations per parameter and token, at best.
    least = cost.work.given * 2 * shape.parameters / (CHIPS["M2 Max"].teraflops * 1e12)
    assert least < stages["reading"] < 2 * least
    assert least < stages["generating"] < 2 * least * cost.work.tokens / cost.work.given

"""The endurance benchmark: what its windows hold, and when a bound breaks."""

import io
import json
from contextlib import redirect_stdout

import mlx.core as mx
import pytest

from mlx_redrafter.bench.lab import endurance
from mlx_redrafter.bench.lab.__main__ import main
from mlx_redrafter.bench.lab.endurance import FIXED, PARTS, Steps, Watch, Window, endure, judge
from mlx_redrafter.bench.runs import PLAIN, STOCK
from mlx_redrafter.decoding import clock as step_clock
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.policy.plans import PLANS, SIZES, WIDTHS, FixedPolicy
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.target.target import Target

TREE = "top_n w4 l5 n8"
COSTS = StepCosts(
    99.0,
    {size: 1 + 0.01 * size for size in SIZES},
    dict.fromkeys(WIDTHS, 0.0),
    dict.fromkeys(WIDTHS, 0.01),
)


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    """As in the library's tests: no choice of shapes depends on step times.

    Timing forward passes alone keeps the decoder waiting for most of a step; a busy machine, which
    may do so for a moment, leaves no step out.
    """
    monkeypatch.setattr(step_clock, "MAX_ABSENCE", 0.5)
    monkeypatch.setattr(endurance, "step_costs", lambda *_: COSTS)


def make_window(memory=50e6, **ratios):
    """A window whose steps of each shape take so many times their forward pass alone."""
    names = {"plain": PLAIN, "tree": TREE}
    steps = {names[key]: Steps([2.0 * ratio] * 9, 2.0) for key, ratio in ratios.items()}
    return Window(500, 3.0, steps, {STOCK: 1.0, FIXED: 2.0}, int(memory), int(memory), 0, 256)


def test_windows(pair):
    windows = list(endure(*pair, [5, 6, 7], None, 8 * 128, 128))
    assert len(windows) == 8
    lengths = [window.length for window in windows]
    assert lengths == sorted(lengths)
    assert 3 + 64 - 16 <= lengths[0] <= 3 + 64 + 16
    rows = [window.kv_rows for window in windows]
    assert rows == sorted(rows)
    assert windows[-1].kv_rows >= 8 * 128
    # Two layers of keys and values: two heads of eight numbers in float32.
    assert windows[-1].kv_bytes == 2 * 2 * windows[-1].kv_rows * 2 * 8 * 4
    for i, window in enumerate(windows):
        timed = sum(len(steps.seconds) for steps in window.steps.values())
        # Each part leaves one step out, which was under way; the first token belongs to none.
        assert (128 if i else 127) / window.tokens_per_step == pytest.approx(timed + PARTS)
        assert window.forwards.keys() == {STOCK, FIXED}
        assert window.peak >= window.memory
        assert window.ratio(window.most_frequent) > 0
    # Nothing but what is in flight stays beyond the weights and the rows.
    assert abs(windows[-1].memory - windows[1].memory) < 1e6


def test_plain_steps_are_compared_with_stock(pair):
    class Plain(FixedPolicy):
        def __init__(self, seconds):
            super().__init__(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endurance, "AdaptivePolicy", Plain)
        window = next(endure(*pair, [5], None, 8 * 128, 128))
    assert window.steps.keys() == {PLAIN}
    assert window.steps[PLAIN].alone == window.forwards[STOCK]
    assert window.tokens_per_step == 1


def test_a_fixed_shape(pair):
    window = next(endure(*pair, [5], DraftPlan.of(4, 5, 8), 8 * 128, 128))
    assert window.steps.keys() == {TREE}


def test_what_cannot_be_measured_is_refused(pair):
    with pytest.raises(ConfigError, match=r"are 4098, the model's context is 4096; .*--context"):
        endure(*pair, [5, 6], None, 4096, 128)
    with pytest.raises(ConfigError, match=r"at least 1600 \(8 windows of 200\), got 1599"):
        endure(*pair, [5], None, 1599, 200)
    with pytest.raises(ConfigError, match="window must be an integer at least 128"):
        endure(*pair, [5], None, 799, 8)


def test_a_leak_breaks_the_bound():
    windows = [make_window(plain=1.1) for _ in range(8)]
    assert [finding.holds for finding in judge(windows)] == [True, True]
    for memory, holds in ((57.9e6, True), (58.1e6, False)):
        assert judge([*windows[:-1], make_window(memory, plain=1.1)])[0].holds is holds
    large = [make_window(900e6, plain=1.1) for _ in range(7)]
    for memory, holds in ((989e6, True), (991e6, False)):
        assert judge([*large, make_window(memory, plain=1.1)])[0].holds is holds


def test_steps_that_grow_faster_than_attention_break_the_bound():
    start = [make_window(tree=9.0)] + [make_window(tree=1.5) for _ in range(5)]
    for ratio, holds in ((1.64, True), (1.66, False)):
        finding = judge([*start, make_window(tree=ratio), make_window(tree=ratio)])[1]
        assert finding.holds is holds
        assert TREE in finding.name


def test_like_is_compared_with_like():
    # Plain steps are many at first and few at the end; trees are the other way round.
    start = [make_window(plain=1.0, tree=3.0) for _ in range(6)]
    late = [make_window(tree=3.0) for _ in range(2)]
    found = judge([*start, *late])[1]
    assert TREE in found.name
    assert found.holds
    nothing_shared = judge([*[make_window(plain=1.0) for _ in range(6)], *late])[1]
    assert "all shapes" in nothing_shared.name
    assert not nothing_shared.holds


def test_steps_that_waited_for_the_caller_are_left_out():
    watch = Watch(FixedPolicy(None))
    plan = PLANS[0, 0]
    for observed, seconds in ((None, None), (plan, 0.5), (plan, 2.0), (None, 0.25)):
        watch.observe(Step(observed, observed.num_nodes if observed else 1, [0], seconds))
    assert watch.seconds == {plan: [0.5, 2.0], None: [0.25]}
    watch.begin()
    assert not watch.seconds


def test_a_blank_cache_can_be_of_any_length(pair):
    target = Target(pair[0])
    cache = target.blank_cache(700)
    before = cache.stock[0].nbytes
    for length in (10, 690, 5):
        cache.settle(length)
        mx.eval(*target.advance(mx.array([1]), cache))
        assert cache.length == length + 1
    assert cache.stock[0].nbytes == before


def test_command(folders, tmp_path):
    out = tmp_path / "endurance.json"
    arguments = ["endurance", "--model", folders[0], "--drafter", folders[1], "--prompt", "abc",
                 "--tokens", 1024, "--window", 128, "--out", out]  # fmt: skip
    with redirect_stdout(io.StringIO()) as output:
        code = main([str(argument) for argument in arguments])
    assert code in (0, 1)
    assert "memory beyond weights and K/V" in output.getvalue()
    found = json.loads(out.read_text())
    assert found["kind"] == "endurance"
    assert found["configuration"]["shape"] == "auto"
    assert len(found["windows"]) == 8
    assert (code == 0) == all(f["found"] <= f["bound"] for f in found["findings"])
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").stat().st_size > 5000

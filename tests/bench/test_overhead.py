"""The overhead benchmark: what it times adds up."""

import pytest

from mlx_redrafter.bench.lab import overhead
from mlx_redrafter.bench.lab.host_time import COMMON, measure_steps
from mlx_redrafter.bench.lab.overhead import measure_overhead
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError


@pytest.mark.parametrize("max_tokens", [1000, 2])
def test_parts(pair, max_tokens):
    model, drafter = pair
    calls = []
    found = measure_overhead(
        model,
        drafter,
        [5, 6, 7],
        DraftPlan.of(3, 4, 7),
        rounds=4,
        max_tokens=max_tokens,
        on_progress=lambda *c: calls.append(c),
    )
    samples = found.samples
    assert {len(values) for values in samples.values()} == {4}
    differences = sorted(
        step - verify - draft
        for step, verify, draft in zip(
            samples["step"], samples["verify"], samples["draft"], strict=True
        )
    )
    assert found.overhead.median == pytest.approx(sum(differences[1:3]) / 2)
    assert found.overhead.low <= found.overhead.median <= found.overhead.high
    assert found.unhidden.median > found.overhead.median
    assert found.tokens_per_step >= 1
    assert calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize(("max_tokens", "begins"), [(1000, 1), (2, 10)])
def test_a_text_begins_again(pair, monkeypatch, max_tokens, begins):
    made = []

    class Counted(SequenceDecoder):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(overhead, "SequenceDecoder", Counted)
    measure_overhead(*pair, [5, 6, 7], DraftPlan.of(3, 4, 7), rounds=4, max_tokens=max_tokens)
    # The first text, and one before each of five rounds that warm up and four that count.
    assert len(made) == begins


def test_trees_of_changing_size_are_refused(pair):
    with pytest.raises(ConfigError, match="top_n"):
        measure_overhead(*pair, [5], DraftPlan.of(2, 3, select="beam"))


def test_a_compiled_pass_lets_the_device_go_on_without_a_read() -> None:
    config = {**COMMON, "model_type": "llama", "num_hidden_layers": 1}
    plan = DraftPlan.of(1, 5, 5)
    found = [measure_steps(config, plan, compiled, 12) for compiled in (False, True)]
    assert [one.reads for one in found] == [1, 1]
    assert found[0].waiting > found[1].waiting == 0

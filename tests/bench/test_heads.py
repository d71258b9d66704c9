"""Drafters of several kinds beside each other."""

import json
import shutil
import sys
from dataclasses import asdict

import mlx.core as mx
import pytest

from mlx_redrafter.bench.lab.heads import Head, HeadCost, HeadRow, Heads, compare_heads
from mlx_redrafter.bench.lab.heads_plot import plot_heads, plot_results
from mlx_redrafter.bench.lab.pooled_heads import Spread, pool
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row
from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.errors import ConfigError, RedrafterError
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa
from tests.bench.commands import run_lab

PROMPTS = [EncodedPrompt("p", "c", [5, 6, 7, 5, 6])]


def compare(model, tokenizer, heads, temps=(0.0,), length=4):
    setting = CommonSettings(model, tokenizer, heads[0].drafter, 12)
    return compare_heads(setting, heads, PROMPTS, temps, length, 1, Recording(None, "heads", {}))


def test_every_text_is_the_targets_own_and_every_drafter_has_its_cost(folders):
    model, tokenizer, drafter = load(*folders)
    heads = [Head("a", drafter, 100), Head("plain", Lookup()), Head("mlx-lm", drafter)]
    found = compare(model, tokenizer, heads, (0.0, 1.0))
    assert [(row.name, row.temp) for row in found.rows] == [
        (name, temp) for temp in (0.0, 1.0) for name in ("a", "plain", "mlx-lm")
    ]
    assert all(row.chain.num_different == row.default.num_different == 0 for row in found.rows)
    own, lookup, _ = found.costs
    assert own.trained_tokens == 100
    assert lookup.trained_tokens is None
    assert own.bytes > 0 == lookup.bytes
    assert own.drafting > 0 == lookup.drafting
    assert own.verify > 0 < own.plain


def test_chains_are_as_long_as_the_drafter_reaches(folders):
    model, tokenizer, _ = load(*folders)
    heads = Medusa(MedusaConfig(320, 32, 2, 1))
    mx.eval(heads.parameters())
    found = compare(model, tokenizer, [Head("two heads", heads)], length=6)
    assert found.costs[0].chain == 3


def test_layers_that_a_drafter_reads_are_watched_in_the_target_at_hand(folders):
    model, tokenizer, _ = load(*folders)
    sizes = {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    eagle = Eagle(
        EagleConfig(3, hidden_size=32, vocab_size=320, captured_layers=(0, 1, 1), **sizes)
    )
    mx.eval(eagle.parameters())
    found = compare(model, tokenizer, [Head("eagle", eagle)])
    assert found.rows[0].chain.num_different == 0


def test_drafting_is_counted_in_plain_steps():
    cost = HeadCost("a", None, 1, plain=2.0, first=1.0, level=0.5, verify=3.0, chain=5)
    assert cost.drafting == pytest.approx(1.5)


def test_the_command(folders, tmp_path):
    target, drafter = folders
    trained = shutil.copytree(drafter, tmp_path / "trained")
    run_file = {"tokens": 5000, "head": "redrafter"}
    run_file |= {"recipe": "apple", "self_generated": 0.0, "seed": 1}
    (trained / "run.json").write_text(json.dumps(run_file))
    prompts, out = tmp_path / "p.txt", tmp_path / "h.json"
    prompts.write_text("abc abc\n\ndef def")
    drafters = ("--drafter", drafter, "--drafter", trained, "--drafter", "lookup")
    options = ("--model", target, *drafters, "--prompts", prompts, "-o", out, "-m", 6)
    text = run_lab("heads", *options, "--repeats", 1, "--temps", "0,1", "--length", 3)
    assert "lookup" in text
    result = json.loads(out.read_text())
    assert result["configuration"]["drafters"] == ["drafter", "trained", "lookup"]
    assert [cost["trained_tokens"] for cost in result["found"]["costs"]] == [None, 5000, None]
    kind = "redrafter, apple, self-generated 0.0"
    assert [cost["kind"] for cost in result["found"]["costs"]] == ["", kind, ""]
    assert len(result["runs"]) == 2 * 2 * (2 + 2 * 3)
    assert out.with_suffix(".png").exists() == ("matplotlib" in sys.modules)
    with pytest.raises(ConfigError, match="called drafter"):
        run_lab("heads", "--drafter", drafter, "--drafter", drafter, "--prompts", prompts)
    with pytest.raises(ConfigError, match="temperatures"):
        run_lab("heads", "--drafter", drafter, "--prompts", prompts, "--temps", "-1")


def row(speed, tokens=2.0):
    return Row("", estimate([speed]), None, None, tokens, [], None, 0, 0, 1)


def result_of(speeds, model="m"):
    """A result whose drafters, by name, have these tokens of training, kinds and speeds."""
    costs = [
        HeadCost(name, tokens, 10**6, 1.0, 0.2, 0.1, 1.0, 5, kind)
        for name, (tokens, kind, _) in speeds.items()
    ]
    rows = [HeadRow(n, 0.0, row(s - 0.1, s), row(s, s + 1)) for n, (_, _, s) in speeds.items()]
    machine = {"processor": "p", "cores": 2}
    return {
        "kind": "heads", "commit": "0123456789", "machine": machine, "disturbances": [],
        "configuration": {"model": model}, "found": asdict(Heads(costs, rows)),
    }  # fmt: skip


RESULTS = {
    "here/a": result_of({"h-0": (1000, "eagle", 1.5), "h-1": (1000, "eagle", 1.7)}),
    "here/b": result_of(
        {"h-2": (1000, "eagle", 1.9), "x-0": (None, "", 1.2), "x-1": (None, "", 1)}
    ),
    "here/c": result_of({"long-0": (2000, "eagle", 2.0)}),
}


def test_drafters_that_differ_in_their_seed_are_pooled():
    first, longer, other = sorted(
        pool(RESULTS.values()), key=lambda one: (one.group.kind, one.group.trained_tokens or 0)
    )
    assert (first.group.kind, first.group.trained_tokens, first.num_seeds) == ("eagle", 1000, 3)
    assert first.default_speed == pytest.approx((1.7, 1.5, 1.9))
    assert first.chain_speed == pytest.approx((1.6, 1.4, 1.8))
    assert first.chain_tokens == pytest.approx((1.7, 1.5, 1.9))
    assert first.default_tokens == pytest.approx((2.7, 2.5, 2.9))
    assert first.drafting == pytest.approx((0.6, 0.6, 0.6))
    assert (longer.group.trained_tokens, longer.num_seeds) == (2000, 1)
    assert (other.group.kind, other.num_seeds) == ("x", 2)
    assert Spread.of([None]) is None
    assert Spread(1.234, 1.0, 1.5).text() == "1.23 (1.00-1.50)"


def test_several_results_in_one_plot(tmp_path):
    with pytest.raises(RedrafterError, match="on one target, found"):
        plot_results(tmp_path / "h.png", [*RESULTS.values(), result_of({}, "other")])
    pytest.importorskip("matplotlib")
    assert plot_results(tmp_path / "h.png", list(RESULTS.values())).stat().st_size > 0


@pytest.mark.parametrize("tokens", [(None, None), (1000, None), (1000, 2000)])
def test_speed_is_drawn_against_training_where_it_differs(tokens, tmp_path):
    pytest.importorskip("matplotlib")
    costs = [
        HeadCost(name, n, 1, 1.0, 1.0, 1.0, 1.0, 3) for name, n in zip("ab", tokens, strict=True)
    ]
    rows = [HeadRow(name, temp, row(1.1), row(1.4)) for temp in (0.0, 1.0) for name in "ab"]
    path = plot_heads(tmp_path / "h.png", Heads(costs, rows), "heading")
    assert path.stat().st_size > 0

"""Drafts made ahead, computed for machines with a second engine."""

import json
import random
from dataclasses import replace

import pytest

from mlx_redrafter.bench.lab.predraft import BY_AGE, HOST, Pairing, SecondEngine
from mlx_redrafter.errors import ConfigError
from tests.bench.commands import run_lab

FREE = SecondEngine("free", 0.0, 0.0)
PAIRING = Pairing("p", 1.25, 0.06, 6, BY_AGE, is_recurrent=True)


def played(pairing, engine, hit_rate, steps=100_000):
    """Tokens per time of many steps played one after the other."""
    rng = random.Random(1)
    time = tokens = 0.0
    age = 0
    for _ in range(steps):
        accepted = 0
        while (
            accepted < pairing.length - 1
            and rng.random() < pairing.accepted[min(age + accepted, len(pairing.accepted) - 1)]
        ):
            accepted += 1
        tokens += accepted + 1
        beside = pairing.length * pairing.level * engine.level
        time += max(pairing.verify * (1 + engine.slowdown), beside) + HOST
        if rng.random() < hit_rate:
            age = accepted + 1 if pairing.is_recurrent else 0
        else:
            time += (pairing.length - 1) * pairing.level
            age = 0
    return tokens / time


@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(
    "engine", [FREE, SecondEngine("slow", 6.0, 0.15)], ids=lambda one: one.name
)
@pytest.mark.parametrize("is_recurrent", [True, False])
def test_the_computed_speed_is_that_of_many_steps(engine, hit_rate, is_recurrent):
    pairing = replace(PAIRING, is_recurrent=is_recurrent)
    expected = played(pairing, engine, hit_rate)
    assert pairing.speed(engine, hit_rate) == pytest.approx(expected, rel=0.01)


def test_without_hits_on_a_free_engine_nothing_changes():
    assert PAIRING.speed(FREE, 0.0) == pytest.approx(PAIRING.speed())


def test_tables_of_cases_and_of_a_given_one(tmp_path):
    assert "target of 27B" in run_lab("predraft")
    out = tmp_path / "p.json"
    options = ("--verify", 1.2, "--level", 0.1, "--accepted", "0.7,0.6", "--hits", "0,1")
    assert "given" in run_lab("predraft", *options, "--recurrent", "-o", out)
    rows = json.loads(out.read_text())["found"]
    assert [row["pairing"] for row in rows] == ["given"] * 3
    with pytest.raises(ConfigError, match="belong together"):
        run_lab("predraft", "--level", 0.1)
    with pytest.raises(ConfigError, match="shares from 0 to 1"):
        run_lab("predraft", "--hits", "2")


def test_comparison_with_and_without(folders, tmp_path, monkeypatch):
    # Times of tiny models are of no use, and take most of the time.
    monkeypatch.setattr(
        "mlx_redrafter.bench.lab.commands.predraft_speed.time_shapes", lambda *_: None
    )
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "c.json"
    prompts.write_text("abc abc")
    options = ("--model", target, "--drafter", drafter, "--prompts", prompts, "-o", out)
    text = run_lab("predraft_speed", *options, "-m", 12, "--repeats", 1, "--predraft", 4)
    assert "auto, predrafted" in text
    result = json.loads(out.read_text())
    fixed = "top_n w4 l5 n9, predrafted"
    assert result["hits"][fixed]["passes"] > 0
    different = {row["arm"]: row["num_different"] for row in result["rows"]}
    assert different[fixed] == different["auto, predrafted"] == 0

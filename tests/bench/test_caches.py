"""Costs of steps as a text grows: the command, and memory that grows or does not."""

import json
import sys

import pytest

from mlx_redrafter.bench.lab.caches import (
    COMMON,
    MODELS,
    ONE,
    STOCK,
    TREE,
    measure_caches,
)
from mlx_redrafter.errors import UnsupportedTargetError
from tests.bench.commands import run_lab

SMALL = {"vocab_size": 64, "sliding_window": 16}


@pytest.fixture(scope="module")
def found():
    configs = {name: {**config, **SMALL} for name, config in MODELS.items()}
    return measure_caches(configs, [200, 2000], num_tokens=4, rounds=2)


def test_one_cost_of_each_model_and_context(found):
    assert [(cost.model, cost.context) for cost in found] == [
        (name, context) for name in MODELS for context in (200, 2000)
    ]
    for cost in found:
        assert {ONE, STOCK, TREE} < cost.seconds.keys() == cost.ratios.keys()
        assert cost.ratios[ONE] == 1


def test_memory_grows_with_the_text_but_for_windows(found):
    growth = {cost.model: 0 for cost in found}
    for short, long in zip(found[::2], found[1::2], strict=True):
        growth[short.model] = long.peak - short.peak
    row = 2 * COMMON["num_key_value_heads"] * COMMON["head_dim"] * 4
    assert abs(growth["windows"]) < 100 * row
    assert growth["all tokens"] > 4 * 1500 * row
    assert 2 * 1500 * row < growth["windows and all tokens"] < growth["all tokens"]


def test_the_command(folders, tmp_path):
    target, _ = folders
    out = tmp_path / "caches.json"
    text = run_lab(
        "caches", "--model", target, "--contexts", "16,40", "--tree-nodes", 3,
        "--rounds", 2, "-o", out,
    )  # fmt: skip
    assert "layers keep" in text
    result = json.loads(out.read_text())
    assert result["kind"] == "caches"
    assert [cost["context"] for cost in result["found"]] == [16, 40]
    assert (tmp_path / "caches.png").exists() == ("matplotlib" in sys.modules)


def test_models_that_are_not_supported_are_refused():
    with pytest.raises(UnsupportedTargetError, match="bitnet"):
        measure_caches({"other": {**COMMON, "model_type": "bitnet"}}, [16], 2, 2)

"""Options and configs: defaults, bounds and messages."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.redrafter.config import DrafterConfig

DRAFTER: dict[str, Any] = {
    "model_type": "recurrent_drafting_drafter",
    "vocab_size": 100,
    "hidden_size": 16,
    "exit_dim": 32,
    "num_draft_layers": 2,
}


def test_sizes_of_a_shape() -> None:
    """2 <= N <= 1 + 4 W (L - 1); merged beams have at most 1 + W (L - 1) nodes."""
    for plan, nodes, max_nodes, level in (
        (DraftPlan.of(), 9, 65, 16),
        (DraftPlan.of(1, 5), 5, 5, 1),
        (DraftPlan.of(2, 2), 9, 9, 8),
        (DraftPlan.of(64, 16, 3841), 3841, 3841, 256),
        (DraftPlan.of(4, 5, select="beam"), None, 17, 16),
    ):
        assert plan.options["tree_nodes"] == nodes
        assert plan.num_nodes == (nodes or max_nodes)
        assert (plan.shape.max_nodes, plan.shape.level_nodes) == (max_nodes, level)
        assert plan.shape.levels == plan.shape.length - 1


# Values of a field that are refused, and what is said before ", got" and the value.
BAD: list[tuple[Any, str, tuple[Any, ...], str]] = [
    (DraftPlan.of, "width", (0, 65, True, 4.0), "beam_width must be an integer from 1 to 64"),
    (DraftPlan.of, "length", (1, 17), "from 2 to 16 (the root counts as one)"),
    (DraftPlan.of, "num_nodes", (1, 66), "from 2 to 65 for beam_width 4 and beam_length 5"),
    (DraftPlan.of, "select", ("topn",), "select must be 'top_n' or 'beam'"),
    (
        SamplingParams,
        "temp",
        (-1e-9, float("inf"), float("nan"), "1", True),
        "temp must be a finite number, 0 or more",
    ),
    (SamplingParams, "temp", (10**20,), "temp must be at most 1e+06"),
    (SamplingParams, "top_p", (-0.1, 1.1, float("nan")), "top_p must be a number from 0 to 1 (0: "),
    (SamplingParams, "min_p", (1.5,), "min_p must be a number from 0 to 1 (0: off)"),
    (SamplingParams, "top_k", (1.5, -1), "top_k must be an integer at least 0 (0: off)"),
    (SamplingParams, "seed", (-1, 2**32, 1.0), "seed must be an integer from 0 to 4294967295"),
]


@pytest.mark.parametrize(("make", "field", "values", "message"), BAD, ids=str)
def test_impossible_shapes_and_sampling(
    make: Any, field: str, values: tuple[Any, ...], message: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            make(**{field: value})
        assert message in str(caught.value)
        assert str(caught.value).endswith(f", got {value!r}")


def test_extreme_sampling_is_possible() -> None:
    SamplingParams(temp=0, top_p=0, min_p=0, top_k=0, seed=0)
    SamplingParams(temp=100, top_p=1, min_p=1, top_k=10**6, seed=2**32 - 1)


def test_drafter_configs_are_read_back_and_keys_of_other_programs_ignored() -> None:
    config = DrafterConfig(100, 16, 40, 0, rnn=True, draft_top_k=50, draft_vocab_size=60)
    assert DrafterConfig.from_dict(config.to_dict()) == config
    assert (config.has_input_proj, config.head_rows) == (True, 60)
    values = {**DRAFTER, "num_lookback_tokens": -1, "emb_norm": True, "rms_norm_eps": 1e-5}
    config = DrafterConfig.from_dict(values)
    assert config == DrafterConfig(100, 16, 32, 2, rnn=False)
    assert (config.has_input_proj, config.head_rows) == (False, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "expected a drafter with model_type .*, found 'llama'"),
        ({"vocab_size": None}, "out of range: drafter vocab_size must be an integer .*None"),
        ({"vocab_size": 2**24 + 1}, "drafter vocab_size must be an integer from 1 to 16777216"),
        ({"exit_dim": -4}, "drafter exit_dim must be an integer from 1 .*got -4"),
        ({"num_draft_layers": 65}, "drafter num_draft_layers must be an integer from 0 to 64"),
        ({"rnn": "yes"}, "drafter rnn must be true or false, got 'yes'"),
        ({"rnn_activation": "relu"}, "must be 'silu' or 'identity', got 'relu'"),
        ({"draft_top_k": 101}, "drafter draft_top_k must be an integer from 1 to 100, got 101"),
        ({"draft_vocab_size": 0}, "drafter draft_vocab_size must be an integer from 1 to 100"),
    ],
    ids=str,
)
def test_impossible_drafter_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_dict({**DRAFTER, **change})
    values = {"model_type": DRAFTER["model_type"], "exit_dim": 32}
    with pytest.raises(CheckpointError, match=r"lacks vocab_size, hidden_size, num_draft_layers"):
        DrafterConfig.from_dict(values)

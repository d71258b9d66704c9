"""Every supported architecture drafts with the probabilities that it has when it decodes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.target import Target
from tests.helpers.flights import flight_of
from tests.models.tiny_models import WITH_WINDOWS, build, main_rope, tiny_config, windowed_config
from tests.models.tiny_recurrent import WITH_STATES
from tests.models.trees import PROMPT

# Far above rounding (float32), far below any wrong position or mask.
TOLERANCE = 2e-3


REFUSED = ("longcat_flash", *WITH_STATES)
# Several tokens at once have one base of the "dynamic" rope, in mlx-lm's own forward passes too.
EXACT = [
    name
    for name in SUPPORTED
    if main_rope(name) != "dynamic" and WITH_WINDOWS.get(name) != {} and name not in REFUSED
]


@pytest.mark.parametrize("model_type", EXACT)
def test_scores_are_sums_of_the_models_log_probabilities(model_type: str) -> None:
    model = build(tiny_config(model_type, main_rope(model_type)))
    drafting = DraftModel(model, None).open(Target(model), PROMPT, True, [])
    # The newest pass has verified a path of four tokens and accepted the first two drafts of it.
    path, bonus = [PROMPT[-1], 7, 8, 9], 30
    flight = flight_of(path, 2, bonus, len(PROMPT) - 1)
    tree = drafting.propose(flight, DraftPlan.of(2, 4, 8), None)
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    scores, depths, *_ = tree.read()
    assert max(depths) > 1
    for node in range(1, len(tokens)):
        drafts, above = [tokens[node]], parents[node]
        while above:
            drafts.insert(0, tokens[above])
            above = parents[above]
        text = [*PROMPT, 7, 8, bonus]
        logits = model(mx.array([[*text, *drafts]]))[0].astype(mx.float32)
        log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        rows = mx.arange(len(text) - 1, len(text) - 1 + len(drafts))
        expected = mx.sum(log_probs[rows, mx.array(drafts)]).item()
        assert scores[node - 1] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("model_type", sorted(WITH_WINDOWS.keys() - {"smollm3"}))
def test_windows_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=r"with caches \w+KVCache\(\w+=8"):
        DraftModel(build(windowed_config(model_type)), None)


@pytest.mark.parametrize("model_type", REFUSED)
def test_states_and_layers_with_several_caches_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=r"with caches (ArraysCache|CacheList)"):
        DraftModel(build(tiny_config(model_type)), None)

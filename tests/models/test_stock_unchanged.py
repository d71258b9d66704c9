"""Hooks change nothing outside a verify, and every architecture drafts with its probabilities."""

import copy
import pickle
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.model_parts import find_parts
from mlx_redrafter.target.target import Target
from tests.helpers.flights import flight_of
from tests.helpers.oracles import are_equal, assert_scores
from tests.models import tiny_models
from tests.models.tiny_models import WITH_WINDOWS, build, main_rope, tiny_config
from tests.models.trees import PROMPT, branching_tree, verify_after_prompt

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


def stock_logits(model: nn.Module) -> list[mx.array]:
    """Logits of a prompt in two chunks and of three single tokens."""
    cache = make_prompt_cache(model)
    chunks = [PROMPT[:7], PROMPT[7:], [3], [50], [9]]
    logits = [model(mx.array([chunk]), cache=cache) for chunk in chunks]
    mx.eval(logits)
    return [*logits, model(mx.array([PROMPT]))]


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_stock_logits_stay_bitwise_equal(model_type):
    model = build(tiny_config(model_type, main_rope(model_type)))
    names = list(named_parameters(model))
    before, hooked = stock_logits(model), list[object]()
    points = find_parts(model).hooks
    for _ in range(2):  # hooks are installed once
        verify_after_prompt(Target(model), branching_tree())
        assert are_equal(before, stock_logits(model))
        found = [hooked_class(point.owner, point.name) for point in points]
        assert all(hasattr(one, "redrafter_hooks") for one in found)
        assert found == (hooked or found)
        hooked = found
    assert find_parts(model).hooks == points
    assert list(named_parameters(model)) == names


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt2", "llama"])
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_hooked_model_are_stock(model_type, way):
    config = tiny_config(model_type, main_rope(model_type))
    model = build(config)
    stock_classes, before = classes(model), stock_logits(model)
    target = Target(model)
    twin = COPIES[way](model)
    assert classes(model) != stock_classes
    assert classes(twin) == classes(build(config)) == stock_classes
    assert are_equal(before, stock_logits(twin))
    expected = verify_after_prompt(target, branching_tree())
    found = verify_after_prompt(Target(twin), branching_tree())
    assert mx.array_equal(expected.logits, found.logits)
    assert mx.array_equal(expected.hidden_states, found.hidden_states)
    assert classes(twin) == classes(model)
    assert are_equal(before, stock_logits(twin))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def hooked_class(owner: object, name: str) -> object:
    return type(owner) if isinstance(owner, nn.Module) else getattr(owner, name)


# Far above rounding (float32), far below any wrong position or mask.
TOLERANCE = 2e-3


REFUSED = ("longcat_flash", *tiny_models.WITH_STATES)
# Several tokens at once have one base of the "dynamic" rope, in mlx-lm's own forward passes too.
EXACT = [
    name
    for name in SUPPORTED
    if main_rope(name) != "dynamic" and WITH_WINDOWS.get(name) != {} and name not in REFUSED
]


@pytest.mark.parametrize("model_type", EXACT)
def test_scores_are_sums_of_the_models_log_probabilities(model_type):
    model = build(tiny_config(model_type, main_rope(model_type)))
    drafting = DraftModel(model, None).open(Target(model), PROMPT, True, [])
    # The newest pass has verified a path of four tokens and accepted the first two drafts of it.
    path, bonus = [PROMPT[-1], 7, 8, 9], 30
    flight = flight_of(path, 2, bonus, len(PROMPT) - 1)
    tree = drafting.propose(flight, DraftPlan.of(2, 4, 8), None)
    assert max(tree.read().depths) > 1
    assert_scores(model, [*PROMPT, 7, 8, bonus], tree, TOLERANCE)


@pytest.mark.parametrize("model_type", [*REFUSED, *sorted(WITH_WINDOWS.keys() - {"smollm3"})])
def test_windows_and_states_are_refused_by_name(model_type):
    has_window = model_type in WITH_WINDOWS
    caches = r"\w+KVCache\(\w+=8" if has_window else "(ArraysCache|CacheList)"
    model = build((tiny_models.windowed_config if has_window else tiny_config)(model_type))
    with pytest.raises(UnsupportedTargetError, match=f"with caches {caches}"):
        DraftModel(model, None)

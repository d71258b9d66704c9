"""The table of what tokens add to a drafter's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter import network
from mlx_redrafter.proposers.redrafter.network import Drafter, input_lookup
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama

VOCAB_SIZE, HIDDEN_SIZE = 67, 32
IDS = mx.array([3, 66, 0, 3])


@pytest.fixture
def target() -> Target:
    return Target(tiny_llama(vocab_size=VOCAB_SIZE))


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter(VOCAB_SIZE, HIDDEN_SIZE)


def _check(drafter: Drafter, target: Target) -> None:
    expected = np.array(drafter.project_input(target.modules.embed(IDS)).astype(mx.float32))
    found = input_lookup(drafter, target)(IDS)
    assert found.dtype == drafter.dtype
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_table_says_what_the_drafter_computes(
    drafter: Drafter, target: Target, dtype: mx.Dtype, bits: int | None
) -> None:
    drafter.set_dtype(dtype)
    if bits is not None:
        quantize_drafter(drafter, bits, 32)
    _check(drafter, target)
    assert drafter.input_table is not None


def test_it_is_made_once_per_pair_of_weights(drafter: Drafter, target: Target) -> None:
    input_lookup(drafter, target)
    first = drafter.input_table
    input_lookup(drafter, Target(target.model))
    assert drafter.input_table is first
    drafter.rnn_w.weight = 2 * drafter.rnn_w.weight
    _check(drafter, target)
    second = drafter.input_table
    assert second is not first
    target.modules.embedding.weight = -target.modules.embedding.weight
    _check(drafter, target)
    assert drafter.input_table is not second
    third = drafter.input_table
    nn.quantize(target.model, 32, 4, class_predicate=lambda _, m: isinstance(m, nn.Embedding))
    _check(drafter, Target(target.model))
    assert drafter.input_table is not third


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_it_notices_weights_that_change_in_place(
    drafter: Drafter, target: Target, dtype: mx.Dtype
) -> None:
    model: Any = target.model
    drafter.set_dtype(dtype)
    changes: list[Callable[[], Any]] = [
        lambda: model.update(tree_map(lambda weight: 2 * weight, model.parameters())),
        lambda: model.set_dtype(dtype),
        lambda: model.model.embed_tokens.weight.__setitem__(3, 0.5),
        lambda: model.model.embed_tokens.weight.__imul__(-1),
        lambda: drafter.rnn_w.weight.__setitem__(0, 0.25),
        lambda: drafter.set_dtype(mx.float32),
    ]
    input_lookup(drafter, target)
    for number, change in enumerate(changes):
        before = drafter.input_table
        change()
        _check(drafter, target)
        if not (number in (1, 5) and dtype == mx.float32):  # the dtype that it has
            assert drafter.input_table is not before
        before = drafter.input_table
        input_lookup(drafter, target)
        assert drafter.input_table is before


def test_there_is_none_where_it_would_be_large_or_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, target: Target
) -> None:
    monkeypatch.setattr(network, "MAX_BYTES", 4 * VOCAB_SIZE * HIDDEN_SIZE - 1)
    _check(drafter, target)
    assert drafter.input_table is None
    drafter.set_dtype(mx.float16)
    _check(drafter, target)
    assert drafter.input_table is not None
    plain = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, rnn=False)
    _check(plain, target)
    assert plain.input_table is None


def test_it_is_no_weight_of_the_drafter(drafter: Drafter, target: Target) -> None:
    before = list(named_parameters(drafter))
    input_lookup(drafter, target)
    assert list(named_parameters(drafter)) == before

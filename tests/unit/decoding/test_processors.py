"""Every node of a tree is processed with its own history."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.trees.tree import NO_TOKEN
from tests.helpers.drafts import make_tree


def test_each_node_sees_the_text_and_its_ancestors() -> None:
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.array(tokens).tolist())
        return logits + 1

    chain = ProcessorChain([record], [1, 2])
    chain.extend(mx.array([7], dtype=mx.int32))  # the root
    tree = make_tree([7, 8, 9, 8, NO_TOKEN], [0, 0, 1, 1, 0], 2)
    logits = mx.zeros((5, 4))
    found = np.array(chain.process_tree(logits, tree))
    assert seen == [[1, 2, 7], [1, 2, 7, 8], [1, 2, 7, 8, 9], [1, 2, 7, 8, 8]]
    assert found[:4].min() == found[:4].max() == 1
    assert found[4].max() == 0  # padding keeps its own


def test_processors_run_in_order_and_may_write_in_place() -> None:
    def write(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, tokens] = 5.0
        return logits

    def double(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * 2

    chain = ProcessorChain([write, double], [0])
    logits = mx.ones((1, 3))
    assert np.array(chain.process(logits)).tolist() == [[10, 2, 2]]
    tree = make_tree([0, 1], [0, 0], 1)
    both = mx.ones((2, 3))
    assert np.array(chain.process_tree(both, tree)).tolist() == [[10, 2, 2], [10, 10, 2]]
    assert np.array(both).tolist() == [[1, 1, 1], [1, 1, 1]]

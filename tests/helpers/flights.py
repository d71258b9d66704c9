"""Forward passes as proposers see them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass


def flight_of(
    path: Sequence[int],
    num_accepted: int,
    bonus: int,
    length: int,
    states: mx.array | None = None,
) -> Pass:
    """A verified path of tokens, root first, of whose drafts some were accepted.

    Args:
        path: Tokens of a chain, the first one the root.
        num_accepted: Accepted drafts.
        bonus: The target's own token after them.
        length: Committed tokens before the root.
        states: States of the nodes.
    """
    outcome = [bonus, num_accepted, *range(len(path)), *path]
    return Pass(
        packed=mx.array(outcome, dtype=mx.int32),
        root=mx.array([bonus], dtype=mx.int32),
        hidden_state=mx.zeros((1,)),
        log_probs=mx.zeros((len(path), 1)),
        length=length,
        path=mx.arange(len(path), dtype=mx.int32),
        plan=None,
        num_nodes=len(path),
        num_unmerged=len(path),
        states=states,
    )

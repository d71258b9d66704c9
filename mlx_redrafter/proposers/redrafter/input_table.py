"""Input terms of a drafter's state, looked up instead of computed where their table is small.

It depends on the token alone, so a level of drafting need not read ``rnn_w``. The table of all
tokens takes the time of some dozens of prompt tokens, once per pair of networks.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed, InputTable
from mlx_redrafter.target.target import Target

# Largest table, in bytes; beside a larger target one matrix of its drafter is little.
MAX_BYTES = 64 * 2**20


def input_lookup(drafter: Drafter, target: Target) -> Embed:
    """`Drafter.project_input` by token id; waits for the device where it makes the table.

    The drafter keeps the table for the next text, as long as the weights that it is made of stay
    what and where they are.
    """
    compute = drafter.input_of(target.embed)
    num_bytes = target.vocab_size * target.hidden_size * drafter.dtype.size
    if not drafter.config.rnn or num_bytes > MAX_BYTES:
        return compute
    modules = drafter.rnn_w, target.embedding
    sources = [array for module in modules for array in named_parameters(module).values()]
    table = drafter.input_table
    if table is None or _places(table.sources) != _places(sources):
        # Computed at once: threads must not share what is not.
        rows = compute(mx.arange(target.vocab_size))
        mx.eval(rows)
        # Second views of the same memory: what is changed in place gets another one.
        views = [array[:] for array in sources]
        mx.eval(views)
        drafter.input_table = table = InputTable(views, rows)
    rows = table.rows
    return lambda ids: rows[ids]


def _places(arrays: list[mx.array]) -> list[int]:
    """Where in memory the numbers of arrays are."""
    return [np.array(array.view(mx.uint8), copy=False).ctypes.data for array in arrays]

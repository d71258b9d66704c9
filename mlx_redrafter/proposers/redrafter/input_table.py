"""Input terms of a drafter's state, read from a table instead of computed if the table is small.

A term depends on the token alone, so a level of drafting need not read ``rnn_w``. Making the table
costs as much time as some dozens of prompt tokens, once per pair of networks.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.proposers.redrafter.recurrence import Embed, InputTable, RecurrentNetwork
from mlx_redrafter.target.target import Target

# Largest table, in bytes. One matrix of the drafter is small next to a target with a larger one.
MAX_BYTES = 64 * 2**20


def input_lookup(drafter: RecurrentNetwork, target: Target) -> Embed:
    """Return `RecurrentNetwork.project_input` by token id, from a table if that is small.

    The drafter keeps the table for the next sequence, as long as the weights behind it stay in the
    same memory. Making the table waits for the device.
    """

    def compute(ids: mx.array) -> mx.array:
        return drafter.project_input(target.modules.embed(ids))

    num_bytes = target.vocab_size * target.hidden_size * drafter.dtype.size
    if not drafter.config.rnn or num_bytes > MAX_BYTES:
        return compute
    modules = drafter.rnn_w, target.modules.embedding
    sources = [array for module in modules for array in named_parameters(module).values()]
    table = drafter.input_table
    if table is None or _places(table.sources) != _places(sources):
        # Computed at once: threads must not share what is not.
        rows = compute(mx.arange(target.vocab_size))
        mx.eval(rows)
        # Second views of the same memory: MLX gives an array that is changed in place another one.
        views = [array[:] for array in sources]
        mx.eval(views)
        drafter.input_table = table = InputTable(views, rows)
    rows = table.rows
    return lambda ids: rows[ids]


def _places(arrays: list[mx.array]) -> list[int]:
    """Return the addresses of the arrays' numbers in memory."""
    return [np.array(array.view(mx.uint8), copy=False).ctypes.data for array in arrays]

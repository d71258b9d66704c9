"""Load a model on all ranks, after a check that all have the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.machines.frames import Do
from mlx_redrafter.machines.leading import lead
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import check_family, digest, load_part


def load_together(
    machines: Machines,
    name: str,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    adapter: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load rank 0's part of a model, which leads the parts that all other ranks load meanwhile.

    Args:
        machines: All ranks.
        name: Name of the model.
        config: Its ``config.json``.
        options: Options of its tokenizer.
        adapter: Folder of a LoRA adapter.

    Raises:
        CheckpointError: A rank lacks the model, has another one, or cannot load its part.
        ConfigError: These machines have a model already.
        UnsupportedTargetError: mlx-lm cannot split the model.
    """
    if machines.has_model:
        raise ConfigError(
            "expected one model on several machines, found a second one; start them again for it"
        )
    check_family(config)
    for line in machines.lines:
        line.say(Do.CHECK, digest(name, adapter), name, adapter)
    _await_all(machines, "; copy it there")
    machines.has_model = True
    for line in machines.lines:
        line.say(Do.SPLIT)
    model, tokenizer = load_part(name, machines.group, options, adapter)
    _await_all(machines)
    lead(machines, model)
    return model, tokenizer


def _await_all(machines: Machines, remedy: str = "") -> None:
    """Wait until all other ranks have done what rank 0 has asked."""
    for line in machines.lines:
        answer = line.receive()
        if answer.do is not Do.YES:
            raise CheckpointError(f"{line.other}: {answer.values[0]}{remedy}")

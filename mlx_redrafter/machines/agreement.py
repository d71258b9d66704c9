"""Load a model on all ranks, after a check that all have the same one."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import CheckpointError, ConfigError, RedrafterError
from mlx_redrafter.kernels.trials import use_kernels
from mlx_redrafter.machines.leading import lead
from mlx_redrafter.machines.line import Do
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import ADAPTER_FILES, check_family, digests, load_part


def load_together(
    machines: Machines,
    name: str,
    config: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    adapter: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load rank 0's part of a model, which leads the parts that all other ranks load meanwhile.

    ``options`` are those of the tokenizer, and ``adapter`` is the folder of a LoRA adapter. Raise
    `CheckpointError` if a rank lacks the model, has another one, or cannot load its part.
    """
    if machines.has_model:
        raise ConfigError(
            "expected one model on several machines, found a second one; start them again for it"
        )
    check_family(config)
    own = digests(name, adapter)
    for line in machines.lines:
        line.say(Do.CHECK, own, name, adapter)
    _await_all(machines, "; copy it there")
    machines.has_model = True
    for line in machines.lines:
        line.say(Do.SPLIT)
    model, tokenizer = load_part(name, machines.group, options, adapter)
    _await_all(machines)
    lead(machines, model)
    return model, tokenizer


def load_when_asked(
    machines: Machines, own_name: str | None = None, own_adapter: str | None = None
) -> nn.Module | None:
    """Answer what rank 0 asks, and load this rank's part; None if rank 0 ends first."""
    (line,), model = machines.lines, None
    while model is None and (frame := line.receive()).do is not Do.END:
        try:
            if frame.do is Do.CHECK:
                expected, name, adapter = frame.values
                name, adapter = own_name or name, own_adapter or adapter
                found = digests(name, adapter)
                if adapter is not None and expected.keys().isdisjoint(ADAPTER_FILES):
                    raise CheckpointError(
                        f"found the adapter {adapter}, which rank 0 lacks; give it there, too, or "
                        "leave it out here"
                    )
                # Weights that are not here yet are downloaded later.
                other = [one for one in expected.keys() & found if found[one] != expected[one]]
                if other:
                    raise CheckpointError(
                        f"expected the {min(other)} that rank 0 has, found another for {name}"
                    )
            else:
                model, _ = load_part(name, machines.group, adapter=adapter)
                use_kernels(model)
            line.say(Do.YES)
        except RedrafterError as error:
            line.say(Do.NO, str(error))
    return model


def _await_all(machines: Machines, remedy: str = "") -> None:
    """Wait until all other ranks have done what rank 0 has asked."""
    for line in machines.lines:
        answer = line.receive()
        if answer.do is not Do.YES:
            raise CheckpointError(f"{line.other}: {answer.values[0]}{remedy}")

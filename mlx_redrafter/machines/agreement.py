"""Check that all ranks have the same model before any of them reads weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_redrafter.errors import CheckpointError, ConfigError, UnsupportedTargetError
from mlx_redrafter.machines.frames import Do, Frame, pack
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import check_family, config_digest


def agree_on(machines: Machines, name: str, config: Mapping[str, Any]) -> None:
    """Let all other ranks begin to load a model, if all have the same one.

    Raises:
        CheckpointError: A rank lacks the model, or has another one.
        ConfigError: These machines have a model already.
        UnsupportedTargetError: mlx-lm cannot split the model.
    """
    if machines.has_model:
        raise ConfigError(
            "expected one model on several machines, found a second one; start them again for it"
        )
    check_family(config)
    own = config_digest(name)
    for rank, answer in _ask(machines, Frame(Do.CHECK, (), name)):
        if answer.do is Do.NO:
            raise CheckpointError(f"{rank}: {answer.text}; copy the model there")
        if answer.text != own:
            raise CheckpointError(
                f"{rank} has another config.json of {name} than rank 0; copy the model there"
            )
    machines.has_model = True
    for line in machines.lines:
        line.say(Do.SPLIT)


def await_parts(machines: Machines) -> None:
    """Wait until all other ranks have loaded their parts.

    Raises:
        UnsupportedTargetError: A rank cannot.
    """
    for line in machines.lines:
        answer = line.receive()
        if answer.do is not Do.YES:
            raise UnsupportedTargetError(f"{line.other}: {answer.text}")


def _ask(machines: Machines, question: Frame) -> Iterator[tuple[str, Frame]]:
    """Ask all other ranks, and yield their names and answers."""
    for line in machines.lines:
        line.send(pack(question))
    for line in machines.lines:
        yield line.other, line.receive()

"""Commands under ``mlx.launch``: rank 0 runs the command, all other ranks follow it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer

from mlx_redrafter.errors import ConfigError, first_line

# Environment variable with which ``mlx.launch`` tells a process its rank.
RANK = "MLX_RANK"
# Commands that split their model; with several words for commands of commands.
COMMANDS = ("generate", "chat", "run", "serve", "check", "bench compare", "bench throughput")
# Seconds in which MLX must have connected all ranks. Python cannot interrupt it, nor can its
# handler of Ctrl-C, in place of which the system's own ends the process.
START_SECONDS = 120.0


def join_machines(arguments: Sequence[str]) -> None:
    """Meet the other ranks, if there are any; returns on rank 0 only.

    Raises:
        ConfigError: The command is for one machine, or a rank is missing or has other versions.
    """
    if RANK not in os.environ:
        return
    from mlx_redrafter.machines.following import follow
    from mlx_redrafter.machines.meeting import meet

    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        group = launched_group()
    finally:
        signal.signal(signal.SIGINT, before)
        faulthandler.cancel_dump_traceback_later()
    if group is None:
        return
    machines = meet(group)
    if not machines.leads:
        follow(machines)
    words = [word for word in arguments if not word.startswith("-")]
    named = " ".join(words[: 2 if words[:1] == ["bench"] else 1])
    if named and named not in COMMANDS:
        raise ConfigError(f"{named} runs on one machine; start it without mlx.launch")
    names = [f"{rank.host} ({rank.device})" for rank in machines.ranks]
    typer.echo(f"{len(names)} machines: {names[0]} leads, {', '.join(names[1:])}", err=True)


def leave_machines(code: int) -> None:
    """End this process and all other ranks, if it has met any."""
    if RANK in os.environ and "mlx_redrafter.machines.meeting" in sys.modules:
        from mlx_redrafter.machines.meeting import met

        for machines in met:
            machines.leave(code)


def launched_group() -> Any:
    """Return MLX's group of the ranks that ``mlx.launch`` has started; None for one rank alone.

    Raises:
        ConfigError: MLX cannot connect them.
    """
    if RANK not in os.environ:
        return None
    import mlx.core as mx

    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"MLX cannot connect the machines: {first_line(error)}; end other launches on these "
            "ports, or give mlx.launch another --starting-port"
        ) from error
    return group if group.size() > 1 else None

"""Commands under ``mlx.launch``: rank 0 runs the command, all other ranks follow it."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import typer

from mlx_redrafter.errors import ConfigError, first_line

# Environment variable with which ``mlx.launch`` tells a process its rank.
RANK = "MLX_RANK"
# Commands that split their model; with several words for commands of commands.
COMMANDS = ("generate", "chat", "run", "serve", "check", "bench compare", "bench throughput")
# Seconds in which MLX must have connected all ranks.
START_SECONDS = 120.0


def join_machines(arguments: Sequence[str]) -> None:
    """Meet the other ranks, if there are any; returns on rank 0 only."""
    if RANK not in os.environ:
        return
    from mlx_redrafter.machines.following import follow
    from mlx_redrafter.machines.meeting import meet

    with _limited():
        group = launched_group()
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
    """Return MLX's group of the ranks that ``mlx.launch`` has started; None for one rank alone."""
    if RANK not in os.environ:
        return None
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        found, remedy = first_line(error), "end other launches on these ports, or give mlx.launch "
        remedy += "another --starting-port"
        if "connect" in found:
            remedy = f"look at the output of {_neighbour(1)}, and start all again"
        raise ConfigError(f"MLX cannot connect the machines: {found}; {remedy}") from error
    return group if group.size() > 1 else None


@contextmanager
def _limited() -> Iterator[None]:
    """End this process with one line if MLX has not connected it within `START_SECONDS`.

    Meanwhile no Python runs here, not even a handler of Ctrl-C, so that the system's own ends the
    process. The limit is that of a native thread of ``faulthandler``, and another process prints
    the line if that thread writes anything.
    """
    line = (
        f"redrafter-mlx: {_neighbour(-1)} did not connect within {START_SECONDS:g} s; look at its "
        "output, and start all again"
    )
    script = ["sh", "-c", 'read -r _ && echo "$0" >&2', line]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(script, stdin=subprocess.PIPE) as printing:
        assert printing.stdin is not None
        faulthandler.dump_traceback_later(START_SECONDS, exit=True, file=printing.stdin)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGINT, before)


def _neighbour(distance: int) -> str:
    """Name the rank at a distance in the ring: it connects to the next one, and waits for the last.

    Other back ends have no such order.
    """
    from mlx_redrafter.machines.meeting import RING

    if RING not in os.environ:
        return "another rank"
    with open(os.environ[RING], encoding="utf-8") as file:
        hosts = [str(rank[0]).rpartition(":")[0] for rank in json.load(file)]
    number = (int(os.environ[RANK]) + distance) % len(hosts)
    return f"rank {number} ({hosts[number]})"

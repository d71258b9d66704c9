"""Ends of ranks: one is killed, stopped or fails, and all others end with one line."""

import random
import signal
import time
from dataclasses import dataclass

from mlx_redrafter.bench.lab.ranks import NotStarted, Ranks, started
from mlx_redrafter.machines.line import PATIENCE

SCRIPT = "mlx_redrafter.bench.lab.machine_text"
# Seconds that ranks may need beyond the limit on signs of life, on a busy machine.
SLACK = 15.0
# Starts of ranks that do not meet, such as on a busy machine.
ATTEMPTS = 3
# Beginning of this package's lines.
OWN = "redrafter-mlx: "
# Events by name: the script's work, the rank that gets a signal, and the signal.
EVENTS: dict[str, tuple[str, int, signal.Signals | None]] = {
    "a follower is killed": ("write", -1, signal.SIGKILL),
    "a follower is stopped": ("write", -1, signal.SIGSTOP),
    "rank 0 is killed": ("write", 0, signal.SIGKILL),
    "rank 0 is stopped": ("write", 0, signal.SIGSTOP),
    "rank 0 gets Ctrl-C": ("write", 0, signal.SIGINT),
    "a follower raises in a pass": ("fail", -1, None),
    "a follower hangs in a pass": ("hang", -1, None),
    "a follower has other versions": ("versions", -1, None),
    "a text of rank 0 fails": ("not finite", -1, None),
}


@dataclass(frozen=True)
class End:
    """The end of all ranks after an event.

    Attributes:
        event: Its name.
        seconds: Seconds from a signal until all ranks but the one that got it had ended; None
            without a signal.
        codes: Exit codes; None for a rank that was left behind, or whose process was stopped.
        lines: This package's last line on each rank, or the last of all.
        left: Number of ranks that had to be killed in the end, the stopped one left out.
    """

    event: str
    seconds: float | None
    codes: list[int | None]
    lines: list[str]
    left: int


def end_by(event: str, model: str, size: int = 2) -> End:
    """Start ranks that write, let the event happen, and wait for their ends."""
    work, victim, act = EVENTS[event]
    return _end(event, work, model, size, victim % size, act, 0.0)


def kill_at_random(number: int, model: str, size: int) -> End:
    """Kill or stop a rank at a random time after the start of all, by a seed."""
    draw = random.Random(number)
    victim, act = draw.randrange(size), draw.choice([signal.SIGKILL, signal.SIGTERM])
    seconds = draw.uniform(0, 4)

    name = f"{number}: {act.name} to rank {victim} after {seconds:.2f} s"
    return _end(name, "write", model, size, victim, act, seconds)


def _end(
    event: str,
    work: str,
    model: str,
    size: int,
    victim: int,
    act: signal.Signals | None,
    seconds: float,
) -> End:
    """Start ranks, again if they do not meet; send a signal some seconds after the first tokens."""
    for attempt in range(ATTEMPTS):
        with started(["-m", SCRIPT, work, model], size) as ranks:
            try:
                if act is not None:
                    ranks.wait_for("writing")
                    time.sleep(seconds)
                    ranks.processes[victim].send_signal(act)
                return _await_end(event, ranks, victim, act)
            except NotStarted:
                if attempt == ATTEMPTS - 1:
                    raise
    raise AssertionError


def _own_line(output: str) -> str:
    """Return the line that says why a rank ends; MLX's ring may write beside it."""
    own = [line[line.index(OWN) :] for line in output.splitlines() if OWN in line]
    return (own or output.splitlines() or [""])[-1]


def _await_end(event: str, ranks: Ranks, victim: int, act: signal.Signals | None) -> End:
    sent = time.monotonic()
    others = [rank for rank in range(ranks.size) if rank != victim or act is not signal.SIGSTOP]
    limit = PATIENCE + SLACK if act is not None else 60.0
    ended = ranks.wait(limit, others)
    seconds = max(ended[rank].seconds for rank in others) - (sent - ranks.begun)
    return End(
        event,
        None if act is None else seconds,
        [one.code for one in ended],
        [_own_line(one.out) for one in ended],
        sum(ended[rank].code is None for rank in others),
    )

"""The meeting of all ranks: who they are, and a connection from rank 0 to each other rank."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib.metadata import version
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.device_read import to_rows
from mlx_redrafter.errors import ConfigError, explain
from mlx_redrafter.machines.line import Do, Line, end_process, exit_soon
from mlx_redrafter.version import __version__

# Environment variable of ``mlx.launch`` with the file of addresses, for the ring.
RING = "MLX_HOSTFILE"
# Environment variable of ``mlx.launch`` with rank 0's address, for JACCL.
JACCL = "MLX_JACCL_COORDINATOR"
# Seconds in which all ranks must have connected to rank 0.
MEETING_SECONDS = 60.0
# Bytes of the message in which each rank says who it is, more than any names have.
FACTS_BYTES = 1024
# Packages of which all ranks must have the same version.
PACKAGES = ("mlx", "mlx-lm", "mlx-redrafter")


@dataclass(frozen=True)
class Rank:
    """Number of a rank and names of its machine, device and versions of `PACKAGES`."""

    rank: int
    host: str
    device: str
    versions: Sequence[str]

    @classmethod
    def own(cls, rank: int) -> Rank:
        device = str(mx.device_info().get("device_name", "unknown device"))
        versions = [version("mlx"), version("mlx-lm"), __version__]
        return cls(rank, socket.gethostname(), device, versions)

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"

    def disagreement(self, leader: Rank) -> str | None:
        """Describe versions other than the leader's; None if all are the same."""
        for what, own, other in zip(PACKAGES, self.versions, leader.versions, strict=True):
            if own != other:
                return f"{self.name} has {what} {own}, rank 0 has {other}; install the same"
        return None


@dataclass
class Machines:
    """All ranks, as one of them sees them: rank 0 has a line to each other one, they one to it."""

    group: Any
    ranks: list[Rank]
    lines: list[Line]
    has_model: bool = False

    @property
    def leads(self) -> bool:
        return bool(self.group.rank() == 0)

    def end(self) -> None:
        """Let all other ranks end, as rank 0."""
        for line in self.lines:
            line.close()

    def fail(self, message: str) -> None:
        """End this process with one line, and that of the other end of each line."""
        for line in self.lines:
            line.say(Do.FAIL, message)
        end_process(f"{self.lines[0].own}{message}", 1)

    def leave(self, code: int) -> NoReturn:
        """End this process once its part of the last pass is done; as rank 0, let all others end.

        Python's own end would free every module first, which is a second of CPU time and more, and
        wait for threads that read what never comes.
        """
        if self.leads:
            self.end()
        exit_soon(code)
        with suppress(OSError, RuntimeError):  # from a closed pipe; from MLX, if a rank has gone
            sys.stdout.flush()
            sys.stderr.flush()
            mx.synchronize(generation_stream)
            mx.synchronize(mx.default_stream(mx.cpu))
        os._exit(code)


# The result of `meet`; a process has one group.
met: list[Machines] = []


def meet(group: Any) -> Machines:
    """Connect rank 0 with every other rank, once per process; blocks until all have called it.

    Raise `ConfigError` if a rank does not come, has other versions, or cannot reach rank 0.
    """
    if not met:
        met.append((_join if group.rank() else _gather_ranks)(group))
    return met[0]


def _gather_ranks(group: Any) -> Machines:
    host, key = _own_address(), secrets.token_hex(16)
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=group.size()) as listener:
        ranks, _ = _introduce(group, [host, listener.getsockname()[1], key])
        lines = _await_ranks(listener, key, ranks)
    for line in lines:
        line.begin()
    machines = Machines(group, ranks, lines)
    atexit.register(machines.end)
    for rank in ranks:
        if complaint := rank.disagreement(ranks[0]):
            raise ConfigError(complaint)
    return machines


def _join(group: Any) -> Machines:
    ranks, (host, port, key) = _introduce(group)
    own = ranks[group.rank()]
    try:
        connection = socket.create_connection((host, port), timeout=MEETING_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"{own.name}: cannot reach rank 0 at {host} port {port}: {explain(error)}; let its "
            "firewall accept this program, and start all again"
        ) from error
    line = Line(connection, f"{own.name}: ", ranks[0].name)
    line.say(Do.HELLO, key, own.rank)
    line.begin()
    return Machines(group, ranks, [line])


def _await_ranks(listener: socket.socket, key: str, ranks: Sequence[Rank]) -> list[Line]:
    """Accept one connection from every other rank, and drop those of strangers."""
    missing = {rank.rank: rank for rank in ranks[1:]}
    found: dict[int, Line] = {}
    end = time.monotonic() + MEETING_SECONDS
    while missing and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        line = Line(connection, "", "a rank")
        rank = missing.pop(_who(line, key), None)
        if rank is None:
            connection.close()
            continue
        line.other = rank.name
        found[rank.rank] = line
    if missing:
        raise ConfigError(
            f"expected {len(ranks)} machines, found {len(found) + 1}: {missing[min(missing)].name} "
            f"did not connect within {MEETING_SECONDS:g} s; look at its output, and start all again"
        )
    return [found[rank] for rank in sorted(found)]


def _who(line: Line, key: str) -> int:
    """Return the rank that a new connection is from; 0 for anyone without the key."""
    with suppress(OSError, ValueError, TypeError):
        hello = line.read_first()
        given, rank = hello.values if hello else ()
        if secrets.compare_digest(given, key):
            return int(rank)
    return 0


def _introduce(group: Any, address: Sequence[Any] = ()) -> tuple[list[Rank], list[Any]]:
    """Return all ranks, and what rank 0 gives as its address, on every rank."""
    facts = json.dumps([astuple(Rank.own(group.rank())), address]).encode()
    own = mx.array(list(facts.ljust(FACTS_BYTES)), dtype=mx.uint8)
    everyone = mx.distributed.all_gather(own[None], group=group, stream=mx.cpu)
    told = [json.loads(bytes(row)) for row in to_rows(everyone)]
    return [Rank(*rank) for rank, _ in told], told[0][1]


def _own_address() -> str:
    """Return the address of rank 0 at which the group itself reaches it."""
    if RING in os.environ:
        with open(os.environ[RING], encoding="utf-8") as file:
            return str(json.load(file)[0][0]).rpartition(":")[0].strip("[]")
    if JACCL in os.environ:
        return os.environ[JACCL].rpartition(":")[0].strip("[]")
    return socket.gethostbyname(socket.gethostname())

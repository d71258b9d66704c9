"""Start ranks on this machine as ``mlx.launch`` does, each a process with a hard limit of time.

MLX's ring waits for data in a busy loop. With a C compiler, `shim` makes it sleep until data come,
so that ranks do not take each other's time.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlx_redrafter.errors import ResourceError

# Seconds after which ranks that still run are killed: generous, as machines may be busy.
LIMIT = 270.0


class NotStarted(ResourceError):
    """Ranks have not met: MLX's ring tries to connect five times only."""


class Ended(NamedTuple):
    """End of a rank: its exit code, its output and the seconds until then."""

    code: int | None
    out: str
    seconds: float


class Ranks:
    """Running ranks of one group."""

    def __init__(self, arguments: Sequence[str], size: int, folder: Path, **variables: str):
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
        self.outputs = [folder / f"{rank}.txt" for rank in range(size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.begun = time.monotonic()
        for rank, output in enumerate(self.outputs):
            environment = {
                **os.environ,
                **preloaded(),
                **variables,
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hosts),
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "XDG_CACHE_HOME": str(folder / f"cache{rank}"),
            }
            with output.open("wb") as file:
                command = [sys.executable, *arguments]
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def read(self, rank: int) -> str:
        """Return the output of a rank so far."""
        return self.outputs[rank].read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until rank 0 has printed something."""
        end = time.monotonic() + LIMIT
        while text not in self.read(0):
            is_over = all(process.poll() is not None for process in self.processes)
            if is_over or time.monotonic() > end:
                found = [self.read(i)[-200:] for i in range(self.size)]
                raise NotStarted(f"expected ranks that print {text!r}, found {found}; try again")
            time.sleep(0.05)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.processes)

    def wait(self, limit: float = LIMIT, awaited: Sequence[int] | None = None) -> list[Ended]:
        """Wait until ranks have ended, all by default, and kill those that still run.

        The code is None for one that had to be killed.
        """
        awaited = range(self.size) if awaited is None else awaited
        codes: dict[int, tuple[int | None, float]] = {}
        end = time.monotonic() + limit
        while not codes.keys() >= set(awaited) and time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                if rank not in codes and process.poll() is not None:
                    codes[rank] = process.returncode, time.monotonic() - self.begun
            time.sleep(0.01)
        self.kill()
        never = None, limit
        return [
            Ended(code, self.read(rank), seconds)
            for rank in range(self.size)
            for code, seconds in [codes.get(rank, never)]
        ]

    def kill(self) -> None:
        """Kill all ranks that still run."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started(arguments: Sequence[str], size: int, **variables: str) -> Iterator[Ranks]:
    """Ranks that run a script, none of which outlives the block."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(arguments, size, Path(folder), **variables)
        try:
            yield ranks
        finally:
            ranks.kill()


@cache
def preloaded() -> dict[str, str]:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return {}
    library = Path(tempfile.mkdtemp()) / "ring_shim.so"
    source = Path(__file__).with_name("ring_shim.c")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]

"""A connection between rank 0 and another rank, and the end of both if one is lost.

Nothing can interrupt a rank that waits in a collective operation, and some back ends never notice
that another rank is gone. So signs of life go over a socket, and a rank that misses them ends.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_redrafter.errors import printable
from mlx_redrafter.machines.frames import Do, Frame, pack, read

# Seconds between two signs of life, a tenth of `PATIENCE` so that a busy machine may miss some.
BEAT = 0.5
# Seconds without any sign of life after which a rank counts as lost.
PATIENCE = 8.0
# Seconds that a rank's part of the last pass, or its last answers, may take.
LAST_SECONDS = 5.0
# Functions to call with the line that says why, before a process ends by another rank's loss. None
# may wait for MLX, whose passes do not end any more.
before_end: list[Callable[[str], None]] = []
# Exit code of a rank that another one's loss ends, EX_TEMPFAIL of sysexits.h.
LOST = 75


def end_process(message: str, code: int = LOST) -> None:
    """Print one line, and end this process without any further work but that of `before_end`."""
    try:
        with suppress(OSError, ValueError):  # a stderr that is closed or gone
            sys.stderr.write(f"redrafter-mlx: {printable(message)}\n")
            sys.stderr.flush()
        exit_soon(code)
        for work in before_end:
            work(message)
    finally:
        os._exit(code)


def exit_soon(code: int) -> None:
    """End this process after `LAST_SECONDS`, even if a thread never returns from MLX."""
    timer = threading.Timer(LAST_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()


class Line:
    def __init__(self, connection: socket.socket, own: str, other: str):
        # Names of both ranks in messages; ``own`` is empty for rank 0.
        self.own, self.other = own, other
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._is_over = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(PATIENCE)

    def begin(self) -> None:
        """Give signs of life from now on, and end the process if the other rank gives none."""
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send packed frames; the reading thread ends the process if the other rank is lost."""
        with self._lock, suppress(OSError):
            self._connection.sendall(data)

    def say(self, do: Do, *values: Any) -> None:
        self.send(pack(do, *values))

    def receive(self) -> Frame:
        """Wait for the next frame that is no sign of life."""
        return self._received.get()

    def read_first(self) -> Frame | None:
        """Read a frame before `begin`; None if the connection ends or brings no frame in time."""
        try:
            return read(self._stream)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Let the other rank end in good order."""
        self._is_over = True
        self.say(Do.END)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _beat(self) -> None:
        while not self._is_over:
            time.sleep(BEAT)
            self.say(Do.BEAT)

    def _read(self) -> None:
        try:
            while (frame := read(self._stream)) is not None:
                if frame.do is Do.FAIL:
                    self._end(f"{self.other}: {frame.values[0]}")
                if frame.do is not Do.BEAT:
                    self._received.put(frame)
                if frame.do is Do.END:
                    return
            self._end(f"{self.other} has gone")
        except TimeoutError:
            self._end(f"{self.other} has not answered for {PATIENCE:g} s")
        except ConnectionError:
            self._end(f"{self.other} has gone")
        except (OSError, ValueError, IndexError) as error:
            self._end(f"{self.other} is lost: {error}")

    def _end(self, message: str) -> None:
        if not self._is_over:
            end_process(self.own + message)

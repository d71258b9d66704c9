"""A connection between rank 0 and another rank, its messages, and the end of both if one is lost.

Nothing can interrupt a rank that waits in a collective operation, and some back ends never notice
that another rank is gone. So signs of life go over a socket, and a rank that misses them ends.

A message is a frame: a verb of a fixed set and its values, as a JSON line. Nothing in it is ever
executed, unpickled or imported.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum, auto
from typing import Any, BinaryIO, NamedTuple

from mlx_redrafter.errors import printable

# Maximum number of bytes of a frame, far more than the paths of a large batch have.
MOST_BYTES = 2**20
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


class Do(StrEnum):
    """Verbs, and beside each its values: integers unless it says text.

    Those of passes and caches are names of the methods of `Follower`.
    """

    BEAT = auto()  # a sign of life
    HELLO = auto()  # texts: who a rank is
    CHECK = auto()  # texts: the model's digest and name, the adapter's, or empty ones
    SPLIT = auto()  # load the model's part of this rank
    YES = auto()  # done
    NO = auto()  # text: why a rank cannot do it
    FAIL = auto()  # text: why a rank ends
    END = auto()  # no more passes
    # Passes. Each takes the tokens of rank 0 from the group. Drafts are those of `leader.describe`.
    ADVANCE = auto()  # cache
    CHUNK = auto()  # cache, number of tokens, whether the last layer's output is computed
    VERIFY = auto()  # cache, draft
    BATCH = auto()  # batch, nodes of a tree; of every slot its draft, and its floor
    CALL = auto()  # cache, number of tokens
    # Operations on caches.
    OPEN = auto()  # cache, length, fields of its quantization if it has one
    COMMIT = auto()  # cache, path
    TRIM_TO = auto()  # cache, length
    RESERVE = auto()  # cache, rows
    DROP = auto()  # cache, batch or copy
    # Copies of parts of caches, for later texts.
    COPY_ENTRIES = auto()  # copy, cache, start, end
    COPY_STATES = auto()  # copy, cache
    FILL = auto()  # cache, length, fields of its quantization, copies and lengths, copy of states
    # Operations on the caches of batches.
    KEEP = auto()  # batch, slot, path
    INSERT = auto()  # batch, slot, cache
    LEAVE = auto()  # batch, slot, cache or 0
    RESIZE = auto()  # batch, slots of the new size, rows, old slots


class Frame(NamedTuple):
    do: Do
    values: tuple[Any, ...] = ()


def pack(do: Do, *values: Any) -> bytes:
    return json.dumps([do, *values]).encode() + b"\n"


def read(stream: BinaryIO) -> Frame | None:
    """Read the next frame; None at the end of the stream. Other bytes raise `ValueError`."""
    line = stream.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        if len(line) == MOST_BYTES:
            raise ValueError(f"expected a frame of at most {MOST_BYTES} bytes, found a longer one")
        return None
    try:
        do, *values = json.loads(line)
        return Frame(Do(do), tuple(values))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected a verb and its values, found others: {error}") from error


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
        """Read a frame before `begin`; raise `OSError` if none comes in time."""
        return read(self._stream)

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

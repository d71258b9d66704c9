"""Ctrl-C: this program ends within two seconds with exit code 130 and one line, whatever it does.

A library may hold the main thread for minutes: MLX in a computation, a download until its file is
complete. So a thread of this module sees the signal, too, and ends the process if the command has
not ended soon. All files are written whole or not at all, so nothing is lost but the last piece.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

# Exit code after Ctrl-C.
CODE = 130
# Seconds that a command has to end.
PATIENCE = 1.0

# Lines that say what is kept of the work under way; the last one counts.
_kept: list[Callable[[], str]] = []


class _Watch:
    """The signals that came and that nobody has handled.

    ``num_handled`` is the number of signals that the command handles itself, in its own time.
    """

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        for end in (self._reading, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._lock = threading.Lock()
        self._num_signals = 0
        self.num_handled = 0
        threading.Thread(target=self._run, name="interrupts", daemon=True).start()

    def forget(self) -> None:
        """Count the signals so far as handled, also those that the thread has not read yet."""
        with self._lock:
            self._read()
            self._num_signals = self.num_handled = 0

    def _run(self) -> None:
        while True:
            is_timed = self._num_signals > self.num_handled
            ready, _, _ = select.select([self._reading], [], [], PATIENCE if is_timed else None)
            with self._lock:
                if ready:
                    self._read()
                is_late = is_timed and not ready and self._num_signals > self.num_handled
                if is_late or self._num_signals > self.num_handled + 1:
                    _end_at_once()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self._num_signals += os.read(self._reading, 64).count(signal.SIGINT)


_watch: _Watch | None = None


def watch(is_alone: bool) -> None:
    """End this process soon after Ctrl-C from now on, and at once after a second one.

    One of several machines is not alone: it lets the others end first, in its own time.
    """
    global _watch
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_alone:
        _watch = _Watch()


@contextmanager
def keeping(line: Callable[[], str]) -> Iterator[None]:
    """Say at Ctrl-C what is kept of the work in this context, and how to go on."""
    _kept.append(line)
    try:
        yield
    except KeyboardInterrupt:
        raise  # the line is said at the end of the program
    except BaseException:
        _kept.pop()
        raise
    _kept.pop()


@contextmanager
def handling(num_signals: int = 1) -> Iterator[None]:
    """Let the work in this context handle some signals itself, in its own time."""
    if _watch is not None:
        _watch.num_handled = num_signals
    try:
        yield
    finally:
        if _watch is not None:
            _watch.forget()


def last_line() -> str:
    """Return the line to say at the end, and forget it."""
    line = _kept[-1]() if _kept else "stopped"
    _kept.clear()
    return line


def leave(code: int) -> NoReturn:
    """End this process; Ctrl-C changes nothing any more, and SIGTERM still ends it.

    After Ctrl-C it ends without Python's own end, which waits for threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code != CODE:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed or gone
            stream.flush()
    os._exit(CODE)


def _end_at_once() -> NoReturn:
    """Say the line and end this process, whatever its main thread does."""
    # A progress bar hides the cursor.
    cursor = "\x1b[?25h" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{cursor}\n{last_line()}\n".encode())
    os._exit(CODE)

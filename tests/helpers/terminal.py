"""A program on a terminal of its own, and Ctrl-C there."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Character that a terminal turns into SIGINT.
CTRL_C = b"\x03"
# Seconds until a program must have written or ended.
LIMIT = 180.0


class Ended(NamedTuple):
    """The end of a program: exit code, output, and seconds from the first Ctrl-C to the end."""

    code: int
    output: str
    seconds: float


def interrupt(
    arguments: Sequence[object],
    after: str | Callable[[], bool] = "",
    delay: float = 0.0,
    times: int = 1,
    variables: Mapping[str, str] | None = None,
    python: Sequence[str] = ("-m", "mlx_redrafter"),
) -> Ended:
    """Run Python, by default the program, and type Ctrl-C some seconds after a text or a fact."""
    master, slave = pty.openpty()
    command = [sys.executable, *python, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_own_terminal,
        env={**os.environ, "TERM": "xterm", **(variables or {})},
    )
    os.close(slave)
    output = b""
    start = time.monotonic()
    typed = 0.0
    count = 0
    seen = start if not after else 0.0
    while True:
        now = time.monotonic()
        assert now - start < LIMIT, output.decode(errors="replace")[-2000:]
        if not seen and (after() if callable(after) else after.encode() in output):
            seen = now
        if seen and count < times and now >= max(seen + delay, typed and typed + 0.2):
            os.write(master, CTRL_C)
            typed, count = typed or now, count + 1
        if select.select([master], [], [], 0.02)[0]:
            try:
                output += os.read(master, 65536)
            except OSError:  # the terminal has no process any more
                break
        elif process.poll() is not None:
            break
    code = process.wait()
    end = time.monotonic()
    os.close(master)
    return Ended(code, output.decode(errors="replace"), end - typed if typed else 0.0)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    termios.tcsetwinsize(0, (24, 80))

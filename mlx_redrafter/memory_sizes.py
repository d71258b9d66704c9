"""Memory of this machine, and sizes in bytes for messages."""

import ctypes
import os
import sys
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# Share of a Linux machine's memory below which it is short; the system needs some itself.
SHORT = 0.02
# Reading of macOS that means that memory is nearly used up: 1 is normal, 2 a warning, 4 critical.
CRITICAL = 4
# Name of that reading.
PRESSURE = b"kern.memorystatus_vm_pressure_level"


def read_total_memory() -> int | None:
    """Read the machine's memory in bytes, None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def is_memory_short() -> bool:
    """Return whether the machine is about to run out of memory; False if it does not report it."""
    if sys.platform == "darwin":
        return _read_pressure() >= CRITICAL
    try:
        # MemTotal, MemFree and MemAvailable are the first lines.
        words = MEMINFO.read_bytes().split(None, 9)
        sizes = dict(zip(words[0:9:3], words[1:9:3], strict=False))
        return int(sizes[b"MemAvailable:"]) < SHORT * int(sizes[b"MemTotal:"])
    except (OSError, KeyError):
        return False


def format_bytes(size: float) -> str:
    """Render a size in gigabytes, or megabytes if there are few."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _read_pressure() -> int:
    level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    failed = read is None or read(PRESSURE, ctypes.byref(level), ctypes.byref(size), None, 0)
    return 0 if failed else level.value

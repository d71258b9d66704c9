"""Memory of this machine, and sizes in bytes for messages."""

from __future__ import annotations

import os


def read_total_memory() -> int | None:
    """Read the machine's memory in bytes, None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def format_bytes(size: float) -> str:
    """Render a size in gigabytes, or megabytes if there are few."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

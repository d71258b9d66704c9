"""Origin of a result: machine, versions, commit."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.bench.chips import Chip, find_chip
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.memory_sizes import read_total_memory
from mlx_redrafter.version import __version__

PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers")


def describe() -> dict[str, Any]:
    release, device = platform.mac_ver()[0], mx.default_device()
    name = mx.device_info().get("device_name", "") if device.type == mx.gpu else ""
    return {
        "machine": {
            "system": f"macOS {release}" if release else platform.system(),
            "architecture": platform.machine(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "memory_bytes": read_total_memory(),
            "device": f"{device} {name}".strip(),
            "openblas": has_openblas(),
            "load_average": load_averages(),
        },
        "versions": {
            "mlx_redrafter": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
        },
        "commit": commit(),
    }


def processor_name() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def this_chip() -> Chip | None:
    """Return this machine's chip; None if no figures are known for it."""
    try:
        return find_chip(processor_name())
    except ConfigError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout that this code is in, "+changes" if edited; else None.

    An installed package has none, even if a repository of the user's surrounds it.
    """
    root = Path(__file__).resolve().parent.parent
    folder = str(root)
    if not (root / "mlx_redrafter").is_dir() or not (root / ".git").exists():
        return None
    head = _output("git", "-C", folder, "rev-parse", "HEAD")
    if not head:
        return None
    # Without a lock, which git would leave behind if it is killed.
    status = ("status", "--porcelain", "--untracked-files=no")
    changes = _output("git", "--no-optional-locks", "-C", folder, *status)
    return f"{head}+changes" if changes else head


def load_averages() -> list[float]:
    """Return the mean number of running threads in 1, 5 and 15 minutes; empty if unknown."""
    try:
        return list(os.getloadavg())
    except OSError:
        return []


def has_openblas() -> bool | None:
    """Return whether this process has loaded OpenBLAS; None if unknown."""
    try:
        return "openblas" in Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

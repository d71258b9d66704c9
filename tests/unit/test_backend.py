"""Importing without a back end is one line that names the two there are."""

from __future__ import annotations

import subprocess
import sys

# Stands in for an environment with plain mlx alone on Linux.
NO_BACKEND = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")

sys.meta_path.insert(0, Blocked())
try:
    import mlx_redrafter
except ImportError as error:
    print(error)
"""


def test_no_back_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_BACKEND], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert "mlx[cpu]" in line
    assert "mlx[cuda13]" in line

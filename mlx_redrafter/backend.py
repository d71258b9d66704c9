"""MLX's back end: that there is one, and on Linux that its CPU back end has a fast BLAS.

MLX's CPU wheel ships a reference BLAS, tens of times slower than OpenBLAS. A library that is loaded
globally before ``mlx.core`` takes its place (Debian: libopenblas0-pthread). Nothing happens on
other systems or where the library is not installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

NO_BACKEND = (
    "MLX has no back end in this environment: install mlx-redrafter[cpu] (Apple silicon and Linux) "
    "or mlx-redrafter[cuda13] (Linux with an NVIDIA GPU)"
)


def prepare() -> None:
    """Import ``mlx.core`` with the best BLAS there is.

    Raises:
        ImportError: MLX has no back end.
    """
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(NO_BACKEND) from error

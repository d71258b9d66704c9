"""Load MLX, on Linux with OpenBLAS if it is installed (Debian: libopenblas0-pthread).

MLX's CPU wheel ships a reference BLAS, tens of times slower than OpenBLAS. A library that the
process loads globally before ``mlx.core`` replaces it.
"""

import contextlib
import ctypes
import sys

NO_BACKEND = (
    "MLX has no back end in this environment: install mlx (Apple silicon), mlx[cpu] (Linux) or "
    "mlx[cuda13] (Linux with an NVIDIA GPU)"
)


def prepare() -> None:
    """Import ``mlx.core`` with the fastest BLAS; raise ImportError if MLX has no back end."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(NO_BACKEND) from error

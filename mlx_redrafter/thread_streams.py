"""MLX streams of threads, which end with their thread.

mlx-lm computes on a stream of its own in every thread. MLX keeps a native thread for each of them,
and a native thread that outlives its Python thread aborts the process when the interpreter exits.
"""

import threading

import mlx.core as mx

_of_thread = threading.local()


class _Streams:
    """Ends the MLX streams of a thread with the thread, which drops its thread-local values."""

    def __del__(self) -> None:
        mx.clear_streams()


def end_streams_with_thread() -> None:
    """End the MLX streams of this thread when it ends; for all but the main thread.

    Nothing is lost: no other thread can compute arrays that this one has left uncomputed.
    """
    if threading.current_thread() is not threading.main_thread():
        _of_thread.streams = getattr(_of_thread, "streams", None) or _Streams()

"""Memory of the machine while texts are generated: what MLX wires, and when a text must end."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from mlx_redrafter.decoding.delivery import ProgressCallback
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.memory_sizes import is_memory_short

logger = logging.getLogger(__name__)

# Environment variable that is "0" to leave MLX's wired limit alone.
SWITCH = "MLX_REDRAFTER_WIRED"
# Tokens between two readings of the machine's memory. A reading takes some ten microseconds.
EVERY = 16
# Words of both messages.
REMEDY = (
    "close other programs, or use a shorter context, --kv-bits 8 or a copy of the model in fewer "
    "bits"
)


def wire_memory(model: nn.Module) -> AbstractContextManager[None]:
    """Keep a model's memory where the GPU can read it, as mlx-lm does, unless `SWITCH` is "0"."""
    if os.environ.get(SWITCH) == "0":
        return nullcontext()
    return _wiring.held(model)


class _Wiring:
    """MLX's wired limit of the process, from the first text that is open to the last one.

    Texts end in any order. If each restored the limit that it had found, the end of one would leave
    the others without it, and the end of the last would leave it for good.
    """

    def __init__(self) -> None:
        # A garbage collection inside may end a text of the same thread.
        self._lock = threading.RLock()
        self._count = 0
        self._limit = ExitStack()

    @contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        with self._lock:
            if self._count == 0:
                # mlx-lm counts the bytes at once, and would hold the model until the end.
                counted: Any = [model]
                self._limit.enter_context(wired_limit(counted, [generation_stream]))  # type: ignore[list-item]
                counted.clear()
            self._count += 1
        del model
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._limit.close()


_wiring = _Wiring()


class MemoryGuard:
    """Finds that the machine runs out of memory, so that a text ends before the machine stalls.

    One short reading returns MLX's unused memory to the system. A second one in a row is the end.
    """

    def __init__(self) -> None:
        self._was_short = False

    def ends_text(self, num_tokens: int) -> bool:
        """Return whether a text must end after this many tokens, and log that as one line."""
        must_end = num_tokens % EVERY == 0 and self._is_spent()
        if must_end:
            logger.warning(
                "the memory of this machine is used up: the text ends after %d tokens; %s",
                num_tokens,
                REMEDY,
            )
        return must_end

    def watching(self, on_progress: ProgressCallback) -> ProgressCallback:
        """Return the callback behind a check that raises `ResourceError` if memory is used up."""

        def watch(done: int, total: int) -> None:
            if done < total and self._is_spent():
                raise ResourceError(
                    f"the memory of this machine is used up after {done} of {total} prompt "
                    f"tokens; {REMEDY}"
                )
            on_progress(done, total)

        return watch

    def _is_spent(self) -> bool:
        was_short, self._was_short = self._was_short, is_memory_short()
        if self._was_short:
            mx.clear_cache()
        return was_short and self._was_short

"""One trial of a kernel of this package: whether its bits are those of MLX's, and its times.

A trial compares bits every time. It times the kernel once per machine.

Axes: T rows of inputs, or nodes of a tree.
"""

import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import first_line
from mlx_redrafter.kernels.small_t import ROWS
from mlx_redrafter.measured import load_or_time

logger = logging.getLogger(__name__)

# Timed rounds of each kernel, interleaved, after one round that is not timed.
ROUNDS = 5

Results = Callable[[], list[mx.array]]
Equal = TypeVar("Equal")


@dataclass(frozen=True)
class Times:
    """Seconds per result of MLX's kernel (``stock``) and of this package's."""

    stock: float
    kernel: float


class KernelTrial(ABC, Generic[Equal]):
    """A trial of the kernel for one shape of matrices or of attention, run by its constructor.

    Attributes:
        max_time: Maximum time of a kernel that qualifies, as a share of the time of MLX's.
        reference: Name of the kernel of MLX whose bits count.
        num_layers: Number of layers with the shape.
        equal: Variant or range with the bits of MLX's kernel, or None.
        times: Times by T; empty if ``equal`` is None.
        failure: Reason not to use the kernel, or None.
    """

    max_time: ClassVar[float]
    reference: ClassVar[str]

    def __init__(self, shape: object, num_layers: int, modules: Collection[nn.Module] = ()):
        self.shape = shape
        self.num_layers = num_layers
        self.equal: Equal | None = None
        self.times: dict[int, Times] = {}
        self.failure: str | None = None
        try:
            equal = self.find_equal()
            if equal is None:
                self.failure = f"its bits are not those of {self.reference}"
            else:
                self.times = self._load_or_time(equal, modules)
            self.equal = equal
        except Exception as error:  # a compiler or a driver may raise anything
            self.failure = first_line(error)

    @abstractmethod
    def find_equal(self) -> Equal | None:
        """Find where the kernel has the bits of MLX's; blocks until MLX has computed both."""

    @abstractmethod
    def measure(self, equal: Equal, rows: int) -> Times:
        """Time both kernels for T rows; blocks until MLX has computed the results."""

    @abstractmethod
    def timing_key(self, equal: Equal) -> object:
        """Return what the times depend on beside the shape; its ``repr`` is part of a key."""

    @property
    @abstractmethod
    def outcome(self) -> str:
        """Description of ``equal``."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Values of T at which the kernel takes at most ``max_time`` of the time of MLX's."""
        return tuple(
            rows
            for rows, times in self.times.items()
            if times.kernel <= self.max_time * times.stock
        )

    def _load_or_time(self, equal: Equal, modules: Collection[nn.Module]) -> dict[int, Times]:
        def time_round() -> list[dict[str, float]]:
            logger.info("timing the kernel for %s, once on this machine", self.shape)
            seconds: dict[str, float] = {}
            for rows in ROWS:
                times = self.measure(equal, rows)
                seconds |= {f"stock {rows}": times.stock, f"kernel {rows}": times.kernel}
            return [seconds]

        # The build of the system stands for its compiler and its driver.
        key = self.shape, self.timing_key(equal), platform.version()
        names = [f"{kernel} {rows}" for rows in ROWS for kernel in ("stock", "kernel")]
        (seconds,) = load_or_time(key, modules, names, lambda rounds: False, time_round)
        return {rows: Times(seconds[f"stock {rows}"], seconds[f"kernel {rows}"]) for rows in ROWS}


def time_interleaved(stock: Results, kernel: Results) -> Times:
    """Return the median seconds per result; blocks until MLX has computed the results."""
    rounds = [(_seconds(stock), _seconds(kernel)) for _ in range(1 + ROUNDS)]
    return Times(*(median(seconds) for seconds in zip(*rounds[1:], strict=True)))


def _seconds(build: Results) -> float:
    start = time.perf_counter()
    results = build()
    mx.eval(results)
    return (time.perf_counter() - start) / len(results)

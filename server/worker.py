"""The thread that owns the device: it reads requests from a queue and writes their texts.

Running requests share their forward passes: a request joins the batch after the prefill of its
prompt, and the others go on between the chunks of that prefill. Prompts that wait together share
their passes, too. An error of one request does not end the others.
"""

import logging
import threading
import time
from collections import deque
from contextlib import ExitStack

import mlx.core as mx

from mlx_redrafter.engine.memory_guard import wire_memory
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.server.counters import Counters
from mlx_redrafter.server.job import Job
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.refusals import Refusal

logger = logging.getLogger(__name__)


class Worker(threading.Thread):
    """The thread that writes texts until `stop` is called."""

    def __init__(self, limits: Limits):
        super().__init__(name="redrafter-worker", daemon=True)
        self.counters = Counters()
        self._limits = limits
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._is_stopped = False

    @property
    def is_ready(self) -> bool:
        """True while the thread runs and goes on."""
        return self.is_alive() and not self._is_stopped

    def submit(self, job: Job) -> None:
        """Put a request in the queue, or refuse it if that is full; may be called anywhere."""
        with self._changed:
            if self._is_stopped:
                raise _shutting_down()
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            limits, idle = self._limits, self._limits.max_running - len(self._running)
            if len(self._waiting) >= limits.max_waiting + max(0, idle):
                raise Refusal(
                    f"the queue is full, with {len(self._waiting)} waiting; try again later",
                    status=429,
                    code="queue_full",
                )
            self._waiting.append(job)
            self._changed.notify()

    def is_busy(self, model: LoadedModel) -> bool:
        """Whether requests for a model wait or run; may be called from any thread."""
        with self._changed:
            return any(job.model is model for job in (*self._waiting, *self._running))

    def end(self) -> None:
        """End all texts, with an error for their clients, and then the thread; does not wait."""
        with self._changed:
            self._is_stopped = True
            for job in self._running:
                job.cancel()
            self._changed.notify()

    def stop(self) -> None:
        """Do what `end` does, and wait for the end of the thread."""
        self.end()
        self.join()

    def answer_all(self, refusal: Refusal | None = None) -> None:
        """End the replies of all requests, from another thread, though a step has not ended.

        ``refusal`` is their error, by default that the server ends.
        """
        with self._changed:
            self._is_stopped = True
            for job in [*self._running, *self._waiting]:
                job.receive(refusal or _shutting_down())

    def abandon(self, message: str) -> None:
        """End all requests with status 503, from another thread, if no step will ever end.

        Blocks for half a second, in which the event loop sends the errors.
        """
        self.answer_all(Refusal(message, status=503, code="machine_lost"))
        time.sleep(0.5)

    def gauges(self) -> dict[str, int]:
        return {
            "waiting_requests": len(self._waiting),
            "running_requests": len(self._running),
            "device_bytes": mx.get_active_memory(),
        }

    def run(self) -> None:
        """Write texts until the end; runs in the thread."""
        with ExitStack() as wired:
            try:
                goes_on = self._admit()
                if self._running:
                    # Wired for all texts together: each text alone would unwire it at its end.
                    # No name here refers to the model, which may be unloaded long before the end.
                    wired.enter_context(wire_memory(self._running[0].model.engine.target.model))
                while goes_on:
                    start = time.perf_counter()
                    self._step_all()
                    self.counters.totals["busy_seconds_total"] += time.perf_counter() - start
                    goes_on = self._admit()
            finally:  # no client waits for a thread that an error has ended
                self.end()
                for job in [*self._running, *self._waiting]:
                    job.close()
                    job.receive(_shutting_down())

    def _admit(self) -> bool:
        """Start queued requests, or wait for one; return whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting or self._running)
            while self._waiting and len(self._running) < self._limits.max_running:
                job = self._waiting.popleft()
                job.counters = self.counters
                self._running.append(job)
        return not self._is_stopped

    def _step_all(self) -> None:
        """Send what every request has, and run the next step of the texts of every model."""
        for job in list(self._running):
            self._step(job)
        schedulers = {job.model.scheduler for job in self._running}
        for one in schedulers:
            one.advance(others_wait=any(other.is_decoding for other in schedulers - {one}))

    def _step(self, job: Job) -> None:
        end: Refusal | None = None
        try:
            if job.step():
                return
            if self._is_stopped and job.is_cancelled:
                end = _shutting_down()
        except Refusal as refusal:
            end = refusal
        except BaseException as error:  # a panic of llguidance is no Exception
            logger.exception("a request failed")
            known = isinstance(error, RedrafterError)
            message = str(error) if known else "the request failed; see the server's log"
            end = Refusal(message, status=500, code="failed")
        self._running.remove(job)
        job.receive(end)


def _shutting_down() -> Refusal:
    return Refusal("the server is shutting down", status=503, code="shutting_down")

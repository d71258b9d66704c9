"""The training loop: batch, gradient, step, with regular measurements and checkpoints."""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.files import Arrays
from mlx_redrafter.training.loss import TrainingBatch
from mlx_redrafter.training.state import (
    CurvePoint,
    TrainingProgress,
    has_state,
    load_state,
    save_state,
)
from mlx_redrafter.training.students.student import Student, simulate
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.training_request import TrainingRequest
from mlx_redrafter.training_options import TrainingOptions

# Maximum size of the float32 logits computed at once, in bytes.
LOGITS_BYTES = 2**28
# Minimum ratio to the best measurement that counts as an improvement.
LEAST_GAIN = 1.002
# Share of the steps in which the learning rate rises.
WARM_UP = 0.05
# Final learning rate, as a share of the peak.
FINAL_RATE = 0.01
# Maximum norm of the gradient; longer gradients are scaled down.
GRADIENT_NORM = 1.0
# Decay of the moving average of the weights, per step.
AVERAGE_DECAY = 0.998

Event = Callable[[TrainingProgress], None]


class Optimiser:
    """AdamW with warm-up, cosine, clipping, and a moving average of the weights."""

    def __init__(self, student: Student, stretch: int, options: TrainingOptions, total_steps: int):
        self.student = student
        self.network = student.network
        self.stretch = stretch
        self.recipe = options.recipe
        self.network.freeze(keys=["token_ids"], strict=False)
        rate = make_schedule(options.lr or student.learning_rate, total_steps)
        self.adam = optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=0.0, bias_correction=True)
        self.adam.init(self.network.trainable_parameters())
        self.average = tree_map(mx.array, self.network.trainable_parameters())
        self._gradient = self._compile(self._part_gradient, [self.network.state])
        state = [self.network.state, self.adam.state, self.average]
        self._apply = self._compile(self._apply_gradient, state)

    def step(self, batch: TrainingBatch) -> mx.array:
        """Compute one step, in parts that bound the memory for logits; return its loss in nats."""
        counts = mx.sum(batch.weights, axis=0)
        count = self._num_parts(batch)
        loss = mx.array(0.0)
        gradient: Any = None
        for number in range(count):
            part_loss, part = self._gradient(*batch.part(number, count), counts)
            loss = loss + part_loss
            gradient = part if gradient is None else tree_map(mx.add, gradient, part)
            mx.eval(loss, gradient)
        self._apply(gradient)
        return loss

    def arrays(self) -> Arrays:
        """Return weights, optimiser state and averaged weights by name."""
        weights = self.network.trainable_parameters()
        state = {"weights": weights, "optimiser": self.adam.state, "average": self.average}
        return dict(tree_flatten(state))

    def restore(self, arrays: Arrays) -> None:
        state: Any = tree_unflatten(list(arrays.items()))
        self.network.update(state["weights"])
        self.adam.state = state["optimiser"]
        self.average.update(state["average"])
        compiled = [self.network.state, self.adam.state, self.average]
        self._apply = self._compile(self._apply_gradient, compiled)
        mx.eval(compiled)

    def _num_parts(self, batch: TrainingBatch) -> int:
        if self.stretch > 1:
            return batch.states.shape[0] // self.stretch
        rows, num_steps = batch.weights.shape
        most = LOGITS_BYTES // (4 * self.student.head_rows * num_steps)
        return -(-rows // max(1, most))

    def _part_gradient(self, *arrays: mx.array) -> tuple[mx.array, Any]:
        *fields, counts = arrays
        loss = partial(self.student.loss, self.network, recipe=self.recipe)
        return nn.value_and_grad(self.network, loss)(TrainingBatch(*fields), counts)

    def _apply_gradient(self, gradient: Any) -> mx.array:
        gradient, norm = optim.clip_grad_norm(gradient, GRADIENT_NORM)
        self.adam.update(self.network, gradient)
        # A smaller decay in the first steps, so that the average forgets the initial weights.
        steps = self.adam.step.astype(mx.float32)
        decay = mx.minimum(AVERAGE_DECAY, steps / (steps + 10.0))
        weights = self.network.trainable_parameters()
        self.average.update(
            tree_map(lambda mean, new: decay * mean + (1 - decay) * new, self.average, weights)
        )
        return norm

    def _compile(self, function: Any, state: list[Any]) -> Any:
        return mx.compile(function, inputs=state, outputs=state) if compiling_pays() else function


class Trainer:
    """Trainer of one drafter, from the beginning or from the state of an interrupted run.

    Every measurement calls ``held_out`` for its texts. A resumed run must share ``identity``, the
    options and texts of the run as JSON. Without ``total_steps`` the epochs of the request count.
    """

    def __init__(
        self,
        student: Student,
        order: BatchOrder,
        held_out: Callable[[], Iterable[Shard]],
        request: TrainingRequest,
        identity: str,
        total_steps: int | None = None,
    ):
        self.student = student
        self.order = order
        self.held_out = held_out
        self.request = request
        self.identity = identity
        self.best: Any = {}
        self._saved_at = time.monotonic()
        arrays: Arrays = {}
        options = request.training
        if has_state(request.state_folder):
            arrays, self.progress = load_state(request.state_folder, identity)
        else:
            steps = total_steps or options.epochs * order.steps_per_epoch
            self.progress = TrainingProgress(steps, options.num_evaluations)
        stretch, steps = order.options.stretch, self.progress.total_steps
        self._optimiser = Optimiser(student, stretch, options, steps)
        if arrays:
            self._optimiser.restore(arrays)
            self.best = tree_unflatten(list(arrays.items()))["best"]

    def run(self, on_step: Event, on_best: Callable[[Student], None]) -> Student:
        """Train to the end, and return the drafter with the best averaged weights.

        ``on_step`` receives the progress after every step; the state is written before a
        KeyboardInterrupt from it passes on. ``on_best`` receives the averaged drafter after each
        measurement at least as good as all before.
        """
        progress = self.progress
        if not progress.curve:
            self._measure(on_best)
        while not progress.is_done:
            self._step()
            if self._is_measurement_due():
                self._measure(on_best)
                self.save()
            elif time.monotonic() - self._saved_at >= self.request.training.checkpoint_seconds:
                self.save()
            try:
                on_step(progress)
            except KeyboardInterrupt:
                self.save()
                raise
        return self.student.with_weights(self.best)

    def save(self) -> None:
        arrays = self._optimiser.arrays() | dict(tree_flatten({"best": self.best}))
        save_state(self.request.state_folder, arrays, self.progress, self.identity)
        self._saved_at = time.monotonic()

    def _step(self) -> None:
        progress = self.progress
        start = time.perf_counter()
        found = self._optimiser.step(self.order.batch(progress.step))
        mx.eval(found, self._optimiser.arrays())
        loss = found.item()
        assert isinstance(loss, float)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss became {loss} at step {progress.step + 1}; train with a smaller --lr, "
                f"another --out, and --cache {self.request.cache_folder}, which has the texts"
            )
        progress.step += 1
        progress.loss_sum += loss
        progress.loss_count += 1
        progress.seconds += time.perf_counter() - start

    def _is_measurement_due(self) -> bool:
        progress, total = self.progress, self.progress.total_steps
        count = progress.num_evaluations
        return (progress.step * count) // total > ((progress.step - 1) * count) // total

    def _measure(self, on_best: Callable[[Student], None]) -> None:
        progress = self.progress
        # Training does not change the copy.
        student = self.student.with_weights(self._optimiser.average)
        temp = self.request.data_options.temp
        stats = simulate(student, self.held_out(), self.order.options.beam_length, temp)
        rate = stats.tokens_per_step or 1.0
        loss = progress.loss_sum / progress.loss_count if progress.loss_count else math.nan
        progress.curve.append(CurvePoint(progress.step, progress.seconds, loss, rate))
        progress.loss_sum, progress.loss_count = 0.0, 0
        total = progress.total_steps
        is_progress = rate > LEAST_GAIN * progress.best
        # A high learning rate may prevent improvement at first, above all from a trained start.
        is_early = 2 * progress.step < total
        progress.since_best = 0 if is_progress or is_early else progress.since_best + 1
        # The later of equal weights wins: a few short texts often measure the same.
        if rate >= progress.best or not self.best:
            progress.best, progress.best_step = rate, progress.step
            self.best = tree_map(mx.array, self._optimiser.average)
            mx.eval(self.best)
            on_best(student)
        gave_up = progress.since_best >= self.request.training.patience
        progress.is_done = progress.step >= total or gave_up


def choose_batches(student: Student, request: TrainingRequest) -> BatchOptions:
    """Choose the batches of a drafter, with examples so long that the logits fit."""
    training, length, share = request.training, request.network.length, student.anchor_share
    stretch = 1
    if student.reads_context:
        most = LOGITS_BYTES / (4 * student.head_rows * (length - 1) * share)
        longest = min(request.data_options.sequence_length, training.batch_tokens, int(most))
        stretch = max(2 * length, longest)
    tokens, seed = training.batch_tokens, training.seed
    return BatchOptions(length, tokens, seed, stretch, student.layers, share)


def compiling_pays() -> bool:
    """Tell whether to compile: on the CPU, MLX runs a C++ compiler for seconds and gains little."""
    return bool(mx.default_device() != mx.Device(mx.cpu))


def make_schedule(peak: float, total_steps: int) -> Callable[[mx.array], mx.array]:
    """Make the schedule: linear warm-up, then cosine to a hundredth of the peak."""
    rising = max(1, round(WARM_UP * total_steps))
    falling = max(1, total_steps - rising)
    rise = optim.linear_schedule(peak / rising, peak, rising)
    fall = optim.cosine_decay(peak, falling, FINAL_RATE * peak)
    return optim.join_schedules([rise, fall], [rising])

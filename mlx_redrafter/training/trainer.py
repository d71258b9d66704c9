"""The training loop: batch, gradient, step, and now and then a measurement and a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_redrafter.checkpoint import named_parameters
from mlx_redrafter.config import TreeShape
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.proposers.redrafter.checkpoint import copy_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.training.batches import BatchOrder
from mlx_redrafter.training.files import Arrays
from mlx_redrafter.training.loss import Batch, unrolled_loss
from mlx_redrafter.training.options import (
    LossOptions,
    TrainingOptions,
    default_learning_rate,
)
from mlx_redrafter.training.simulation import simulate
from mlx_redrafter.training.state import Curve, Progress, has_state, load_state, save_state
from mlx_redrafter.training.teacher_cache import Shard

# Float32 logits of one unroll step that exist at one time.
LOGITS_BYTES = 2**28
# Steps whose time says how many fit into the minutes given; the first ones are not typical.
WARM_STEPS, TIMED_STEPS = 3, 10
# A measurement must be this much better to count as progress.
LEAST_GAIN = 1.002
FINAL_RATE = 0.01

Event = Callable[[Progress], None]


class Update(NamedTuple):
    """Results of one optimiser step, not computed yet.

    Attributes:
        loss: Float32 scalar.
        grad_norm: Length of the gradient before clipping, float32 scalar.
    """

    loss: mx.array
    grad_norm: mx.array


class Optimiser:
    """AdamW with warm-up, cosine, clipping, and a moving average of the weights.

    Args:
        drafter: Trained in place; float32.
        embed: The target's input embedding.
        loss: What it is carried_over.
        options: How.
        total_steps: Length of the schedule.
    """

    def __init__(
        self,
        drafter: Drafter,
        embed: Embed,
        loss: LossOptions,
        options: TrainingOptions,
        total_steps: int,
    ):
        self.drafter = drafter
        self.embed = embed
        self.loss_options = loss
        self.options = options
        drafter.freeze(keys=["token_ids"], strict=False)
        peak = options.learning_rate or default_learning_rate(drafter.config.exit_dim)
        self.adam = optim.AdamW(
            learning_rate=_schedule(peak, options.warmup, total_steps),
            betas=[0.9, 0.95],
            weight_decay=0.0,
            bias_correction=True,
        )
        self.adam.init(drafter.trainable_parameters())
        self._cast = Drafter(drafter.config)
        self.average: Arrays = {n: mx.array(v) for n, v in self._trained().items()}
        self._gradient = self._compile(self._part_gradient, [drafter.state])
        state = [drafter.state, self.adam.state, self.average]
        self._apply = self._compile(self._apply_gradient, state)

    def step(self, batch: Batch) -> Update:
        """Take one step; the batch goes through the head in parts that bound the memory."""
        counts = mx.sum(batch.weights, axis=0)
        size = self._part_size(batch)
        loss = mx.array(0.0)
        gradient: Any = None
        for start in range(0, batch.tokens.shape[0], size):
            part_loss, part = self._gradient(*batch.rows(start, start + size), counts)
            loss = loss + part_loss
            gradient = part if gradient is None else tree_map(mx.add, gradient, part)
            mx.eval(loss, gradient)
        return Update(loss, self._apply(gradient))

    def arrays(self) -> Arrays:
        """Weights, optimiser state and average by name."""
        flat = dict(tree_flatten(self.adam.state))
        return {
            **{f"weights.{name}": value for name, value in self._trained().items()},
            **{f"optimiser.{name}": value for name, value in flat.items()},
            **{f"average.{name}": value for name, value in self.average.items()},
        }

    def restore(self, arrays: Arrays) -> None:
        """Continue from what `arrays` returned."""
        self.drafter.load_weights(list(_under("weights.", arrays).items()), strict=False)
        state = tree_unflatten(list(_under("optimiser.", arrays).items()))
        self.adam.state = state
        self.average.update(_under("average.", arrays))
        compiled = [self.drafter.state, self.adam.state, self.average]
        self._apply = self._compile(self._apply_gradient, compiled)
        mx.eval(compiled)

    def averaged(self) -> Drafter:
        """A drafter with the averaged weights; shares nothing with the trained one."""
        return with_weights(self.drafter, self.average)

    def _trained(self) -> Arrays:
        return dict(tree_flatten(self.drafter.trainable_parameters()))

    def _part_size(self, batch: Batch) -> int:
        rows, num_steps = batch.weights.shape
        most = LOGITS_BYTES // (4 * self.drafter.config.head_rows * num_steps)
        parts = -(-rows // max(1, most))
        return -(-rows // parts)

    def _part_gradient(self, *arrays: mx.array) -> tuple[mx.array, Any]:
        *fields, counts = arrays
        function = nn.value_and_grad(self.drafter, self._loss)
        return function(Batch(*fields), counts)

    def _loss(self, batch: Batch, counts: mx.array) -> mx.array:
        drafter = self.drafter
        if self.options.compute_dtype == "bfloat16":
            # A cast inside the gradient: the weights and their gradients stay float32.
            drafter = self._cast
            drafter.update(
                tree_unflatten([(n, v.astype(mx.bfloat16)) for n, v in self._trained().items()])
            )
        return unrolled_loss(drafter, self.embed, batch, counts, self.loss_options)

    def _apply_gradient(self, gradient: Any) -> mx.array:
        gradient, norm = optim.clip_grad_norm(gradient, self.options.max_grad_norm)
        self.adam.update(self.drafter, gradient)
        # Young averages must not remember the initial weights for long.
        steps = self.adam.step.astype(mx.float32)
        decay = mx.minimum(self.options.ema_decay, steps / (steps + 10.0))
        for name, value in self._trained().items():
            self.average[name] = decay * self.average[name] + (1 - decay) * value
        return norm

    def _compile(self, function: Any, state: list[Any]) -> Any:
        return mx.compile(function, inputs=state, outputs=state) if compiling_pays() else function


class Lesson(NamedTuple):
    """What a drafter is trained on and measured on.

    Attributes:
        embed: The target's input embedding.
        order: Batches to train on.
        held_out: Texts to measure on.
        temp: At which the sampled ones of these were.
        loss: What is carried_over.
        options: How.
    """

    embed: Embed
    order: BatchOrder
    held_out: Sequence[Shard]
    temp: float
    loss: LossOptions
    options: TrainingOptions


class Trainer:
    """Trains one drafter, from the beginning or from where an earlier run was stopped.

    Args:
        drafter: In float32, with the weights that training starts from; trained in place.
        lesson: What to train it on.
        folder: Where the state is kept; a state that is there is gone on from.
        identity: Names texts and options: a state with another identity is refused.

    Raises:
        CheckpointError: The state is damaged or has another identity.
    """

    def __init__(self, drafter: Drafter, lesson: Lesson, folder: Path, identity: str):
        self.drafter = drafter
        self.lesson = lesson
        self.folder = folder
        self.identity = identity
        length = lesson.order.options.beam_length
        self.shape = TreeShape(beam_width=1, beam_length=length)
        self.progress = Progress()
        self.best: Arrays = {}
        self._optimiser: Optimiser | None = None
        self._saved_at = time.monotonic()
        if has_state(folder):
            self._restore(*load_state(folder, identity))
        elif lesson.options.minutes is None:
            epochs = lesson.options.epochs
            self.progress.total_steps = epochs * lesson.order.steps_per_epoch

    def run(self, on_step: Event, on_best: Callable[[Drafter], None]) -> Drafter:
        """Train to the end.

        Args:
            on_step: Called after every step. If it raises KeyboardInterrupt, the state is written
                and the exception goes on: this is the way to stop without losing a step.
            on_best: Called with the averaged weights whenever they draft better than before.

        Returns:
            The best averaged weights, float32.

        Raises:
            NonFiniteError: The loss is NaN or infinite.
        """
        progress = self.progress
        if progress.total_steps is None:
            progress.total_steps = self._find_total_steps()
        optimiser = self._require_optimiser(progress.total_steps)
        if not progress.curve:
            self._measure(optimiser, on_best)
        while not progress.is_done:
            self._step(optimiser)
            if self._is_measurement_due():
                self._measure(optimiser, on_best)
                self.save()
            elif time.monotonic() - self._saved_at >= self.lesson.options.checkpoint_seconds:
                self.save()
            try:
                on_step(progress)
            except KeyboardInterrupt:
                self.save()
                raise
        return with_weights(self.drafter, self.best)

    def save(self) -> None:
        """Write the state."""
        assert self._optimiser is not None
        arrays = {
            **self._optimiser.arrays(),
            **{f"best.{name}": value for name, value in self.best.items()},
        }
        save_state(self.folder, arrays, self.progress, self.identity)
        self._saved_at = time.monotonic()

    def _restore(self, arrays: Arrays, progress: Progress) -> None:
        self.progress = progress
        assert progress.total_steps is not None
        self._require_optimiser(progress.total_steps).restore(arrays)
        self.best = _under("best.", arrays)

    def _require_optimiser(self, total_steps: int) -> Optimiser:
        if self._optimiser is None:
            lesson = self.lesson
            self._optimiser = Optimiser(
                self.drafter, lesson.embed, lesson.loss, lesson.options, total_steps
            )
        return self._optimiser

    def _find_total_steps(self) -> int:
        """How many steps the minutes allow; times some steps on a copy and discards them."""
        lesson = self.lesson
        copy = copy_drafter(self.drafter)
        optimiser = Optimiser(copy, lesson.embed, lesson.loss, lesson.options, 1000)
        start = 0.0
        for step in range(WARM_STEPS + TIMED_STEPS):
            if step == WARM_STEPS:
                start = time.perf_counter()
            batch = lesson.order.batch(step % lesson.order.steps_per_epoch)
            mx.eval(optimiser.step(batch), optimiser.arrays())
        seconds = (time.perf_counter() - start) / TIMED_STEPS
        assert lesson.options.minutes is not None
        return max(1, round(60 * lesson.options.minutes / seconds))

    def _step(self, optimiser: Optimiser) -> None:
        progress = self.progress
        start = time.perf_counter()
        update = optimiser.step(self.lesson.order.batch(progress.step))
        mx.eval(update, optimiser.arrays())
        loss = update.loss.item()
        assert isinstance(loss, float)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss became {loss} at step {progress.step + 1}; train with a smaller --lr"
            )
        progress.step += 1
        progress.loss_sum += loss
        progress.loss_count += 1
        progress.seconds += time.perf_counter() - start

    def _is_measurement_due(self) -> bool:
        progress, total = self.progress, self.progress.total_steps
        assert total is not None
        count = self.lesson.options.num_evaluations
        due = (progress.step * count) // total > ((progress.step - 1) * count) // total
        return due or progress.step >= total

    def _measure(self, optimiser: Optimiser, on_best: Callable[[Drafter], None]) -> None:
        progress = self.progress
        drafter = optimiser.averaged()
        lesson = self.lesson
        stats = simulate(drafter, lesson.embed, lesson.held_out, self.shape, lesson.temp)
        rate = stats.tokens_per_step or 1.0
        loss = progress.loss_sum / progress.loss_count if progress.loss_count else math.nan
        progress.curve.append(Curve(progress.step, progress.seconds, loss, rate))
        progress.loss_sum, progress.loss_count = 0.0, 0
        total = progress.total_steps
        assert total is not None
        is_progress = rate > LEAST_GAIN * progress.best
        # While the learning rate is high there may be none, above all from a trained start.
        is_early = 2 * progress.step < total
        progress.since_best = 0 if is_progress or is_early else progress.since_best + 1
        if rate > progress.best or not self.best:
            progress.best, progress.best_step = rate, progress.step
            self.best = {name: mx.array(value) for name, value in optimiser.average.items()}
            mx.eval(self.best)
            on_best(drafter)
        gave_up = progress.since_best >= self.lesson.options.patience
        progress.is_done = progress.step >= total or gave_up


def compiling_pays() -> bool:
    """On the CPU, MLX compiles by running a C++ compiler for seconds and gains next to nothing."""
    return bool(mx.default_device() != mx.Device(mx.cpu))


def with_weights(drafter: Drafter, weights: Arrays) -> Drafter:
    """A drafter of the same shape with other weights; arrays that are not given are shared."""
    copy = copy_drafter(drafter)
    copy.update(tree_unflatten(list({**named_parameters(drafter), **weights}.items())))
    return copy


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {name[len(prefix) :]: v for name, v in arrays.items() if name.startswith(prefix)}


def _schedule(peak: float, warmup: float, total_steps: int) -> Callable[[mx.array], mx.array]:
    """Linear warm-up, then cosine to a hundredth of the peak."""
    rising = max(1, round(warmup * total_steps))
    falling = max(1, total_steps - rising)
    return optim.join_schedules(
        [
            optim.linear_schedule(peak / rising, peak, rising),
            optim.cosine_decay(peak, falling, FINAL_RATE * peak),
        ],
        [rising],
    )

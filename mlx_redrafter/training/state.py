"""Everything that training carries from one step to the next, in one file.

The file is replaced as a whole, so a run that is killed at any moment goes on from a step it has
really finished. Since batches and schedule depend on the step alone, it ends where an undisturbed
run ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.files import Arrays, load_arrays_and_metadata, save_arrays

STATE_FILE = "state.safetensors"


@dataclass
class Curve:
    """What was measured after a step.

    Attributes:
        step: Steps done.
        seconds: Time spent training so far.
        loss: Mean loss since the last measurement, nats; of unequal meaning between recipes.
        tokens_per_step: Simulated on held-out texts, a chain of ``L - 1`` drafts.
    """

    step: int
    seconds: float
    loss: float
    tokens_per_step: float


@dataclass
class Progress:
    """Numbers of a run.

    Attributes:
        step: Steps done.
        total_steps: Steps of the whole run; None until the speed is known.
        seconds: Time spent training so far.
        best: Most tokens per step measured so far.
        best_step: When.
        since_best: Measurements since then in the second half of the run.
        loss_sum: Of the losses since the last measurement.
        loss_count: Their number.
        curve: All measurements.
        is_done: Whether training has ended.
    """

    step: int = 0
    total_steps: int | None = None
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    curve: list[Curve] = field(default_factory=list)
    is_done: bool = False

    def to_json(self) -> str:
        """All numbers; floats read back as the same."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        values["curve"] = [Curve(**point) for point in values["curve"]]
        return cls(**values)


def save_state(folder: Path, arrays: Arrays, progress: Progress, identity: str) -> None:
    """Replace the state in ``folder``; waits for the device."""
    metadata = {"progress": progress.to_json(), "identity": identity}
    save_arrays(folder / STATE_FILE, arrays, metadata)


def has_state(folder: Path) -> bool:
    """Whether a run was begun here."""
    return (folder / STATE_FILE).exists()


def load_state(folder: Path, identity: str) -> tuple[dict[str, mx.array], Progress]:
    """The state in ``folder``.

    Raises:
        CheckpointError: It is damaged, or of a run with other options or texts.
    """
    path = folder / STATE_FILE
    arrays, metadata = load_arrays_and_metadata(path)
    found = metadata.get("identity", "")
    if found != identity:
        raise CheckpointError(
            f"the run in {folder} was begun with other options or texts "
            f"({_difference(found, identity)}); resume it with the same ones, or choose another "
            "--out"
        )
    try:
        return arrays, Progress.from_json(metadata["progress"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no state of a training run ({error}); delete it to begin again"
        ) from error


def _difference(found: str, expected: str) -> str:
    try:
        before, now = json.loads(found), json.loads(expected)
    except ValueError:
        return "its record is damaged"
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            return f"{name}: expected {now.get(name)!r}, found {before.get(name)!r}"
    return "in its record"

"""The state that training carries from one step to the next, in one file.

The file is replaced as a whole, so a killed run continues from a finished step. Batches and
learning rate depend on the step alone, so it ends in the same weights as an undisturbed one.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.files import Arrays, find_difference, load_arrays, save_arrays

STATE_FILE = "state.safetensors"
# Version of the state's arrays, progress and options; a state of another version is an error.
FORMAT = "5"


@dataclass
class CurvePoint:
    """One measurement of the training curve.

    ``loss`` is the mean since the last measurement, in nats, not comparable between recipes.
    ``tokens_per_step`` is simulated on the held-out texts that choose the step, with chains of
    L - 1 drafts.
    """

    step: int
    seconds: float
    loss: float
    tokens_per_step: float


@dataclass
class TrainingProgress:
    """Counters and measurements of a run.

    ``num_evaluations`` is the number of measurements of the whole run, the first one left out.
    ``best`` is the maximum of tokens per step so far, at ``best_step``; ``since_best`` counts the
    measurements without improvement in the second half of the run. ``loss_sum`` is the sum of the
    ``loss_count`` losses since the last measurement, in nats.
    """

    total_steps: int
    num_evaluations: int
    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    curve: list[CurvePoint] = field(default_factory=list)
    is_done: bool = False


def save_state(folder: Path, arrays: Arrays, progress: TrainingProgress, identity: str) -> None:
    """Replace the state in ``folder``; blocks until MLX has evaluated the arrays."""
    metadata = {"format": FORMAT, "progress": json.dumps(asdict(progress)), "identity": identity}
    save_arrays(folder / STATE_FILE, arrays, metadata)


def has_state(folder: Path) -> bool:
    return (folder / STATE_FILE).exists()


def load_state(folder: Path, identity: str) -> tuple[Arrays, TrainingProgress]:
    path = folder / STATE_FILE
    arrays, metadata = load_arrays(path)
    version = metadata.get("format", "1")
    if version != FORMAT:
        raise CheckpointError(
            f"expected a training state of format {FORMAT}, found format {version} in {path}; "
            "finish the run with the version of mlx-redrafter that began it, or choose another "
            "--out"
        )
    try:
        difference = find_difference(json.loads(metadata["identity"]), json.loads(identity))
        if difference is not None:
            raise CheckpointError(
                f"the run in {folder} was begun with other options or texts ({difference}); "
                "resume it with the same ones, or choose another --out"
            )
        values: dict[str, Any] = json.loads(metadata["progress"])
        values["curve"] = [CurvePoint(**point) for point in values["curve"]]
        return arrays, TrainingProgress(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a valid training state ({error}); delete it to begin again"
        ) from error

"""Result files: JSON with the settings, the machine, and raw and derived numbers."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.machine import describe
from mlx_redrafter.checkpoint_files import write_text
from mlx_redrafter.checkpoints.bundled import checkpoint_name
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.errors import CheckpointError, explain

# Version of the layout of result files.
FORMAT = 1
# A list of numbers as `json` indents it; on one line it needs a fifth of the space.
NUMBERS = re.compile(r"\[\n[-+.,\dEe\s]+\]")


def new_result(kind: str, configuration: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Start a result of this machine, with settings that are complete enough to repeat it."""
    return {
        "kind": kind,
        "format": FORMAT,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe(),
        "configuration": dict(configuration),
        **values,
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, default=asdict) + "\n"
    text = NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), text)
    write_text(path, text)


def read_result(path: Path, kind: str) -> dict[str, Any]:
    """Read a result back; raise `CheckpointError` if it is damaged or of another kind."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; choose another file") from error
    found = result.get("kind") if isinstance(result, dict) else type(result).__name__
    if found != kind:
        raise CheckpointError(f"expected a result of {kind!r} in {path}, found {found!r}")
    return dict(result)


def pair_names(model: str | None, drafter: str | None, loaded: Proposer) -> dict[str, Any]:
    """Name a pair in a result, with the bits of the drafter's weights if they are quantised.

    `load` quantises a recurrent drafter if that is faster, so its name alone is not enough.
    """
    parts = (part for network in loaded.networks for part in network.modules())
    bits = next((part.bits for part in parts if hasattr(part, "bits")), None)
    names = {"model": checkpoint_name(model), "drafter": checkpoint_name(drafter)}
    return {**names, "drafter_bits": bits}

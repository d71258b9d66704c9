"""``redrafter-mlx check --kernels``: the table of this package's kernels on this machine."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import typer

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.version import __version__

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_redrafter.kernels.trial import KernelTrial

# Rows T of the table, nodes in case of attention; `--json` has all.
SHOWN = (2, 3, 4, 5, 6, 8, 9, 12, 16)


def check_available() -> None:
    """Raise `ConfigError` unless there is an Apple GPU, and it is what computes."""
    import mlx.core as mx

    from mlx_redrafter.kernels.layers import is_available

    if not is_available():
        raise ConfigError(
            f"--kernels needs an Apple GPU, found {mx.default_device()}; run it on a Mac"
        )


def check_kernels(model: nn.Module, as_json: bool) -> None:
    """Try the kernels on a model's weights and print what that shows.

    Raises:
        typer.Exit: A kernel is not equal, or cannot be compiled or run; the exit code is 1.
    """
    from mlx_redrafter.kernels.selection import try_kernels

    trials = try_kernels(model)
    if as_json:
        typer.echo(json.dumps({"machine": _machine(), "shapes": list(map(_as_dict, trials))}))
    else:
        typer.echo(", ".join(f"{name} {value}" for name, value in _machine().items()))
        typer.echo(
            "\n".join(map(_describe, trials))
            or "neither a matrix nor an attention has a shape that kernels are for"
        )
    if any(trial.failure for trial in trials):
        raise typer.Exit(1)


def _machine() -> dict[str, str]:
    import mlx.core as mx

    device = mx.device_info()
    return {
        "chip": f"{device.get('device_name')} ({device.get('architecture')})",
        "system": platform.version(),
        "mlx": version("mlx"),
        "mlx-redrafter": __version__,
    }


def _as_dict(trial: KernelTrial[Any]) -> dict[str, Any]:
    return {
        "shape": vars(trial.shape),
        "num_layers": trial.num_layers,
        "outcome": trial.failure or trial.outcome,
        "times": {rows: vars(times) for rows, times in trial.times.items()},
        "rows": trial.rows,
        "failure": trial.failure,
    }


def _describe(trial: KernelTrial[Any]) -> str:
    """A line for the shape, and one for the time of every number of rows."""
    lines = [f"{trial.shape}; layers: {trial.num_layers}"]
    if trial.failure:
        return "\n".join([*lines, f"  failed: {trial.failure}"])
    lines.append(f"  {trial.outcome}")
    for rows in SHOWN:
        times = trial.times[rows]
        used = ", used" if rows in trial.rows else ""
        lines.append(
            f"  {rows:2} rows: {1e3 * times.kernel:.3f} ms, MLX's {1e3 * times.stock:.3f} ms{used}"
        )
    return "\n".join(lines)

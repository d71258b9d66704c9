"""The curves of a run as a table, and as a picture where matplotlib is installed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.training.state import CurvePoint

CSV_FILE, PNG_FILE = "curves.csv", "curves.png"
COLUMNS = ("step", "seconds", "loss", "tokens_per_step")


def write_csv(folder: Path, curve: Sequence[CurvePoint]) -> None:
    """Write all measurements, one per line."""

    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for point in curve:
                loss = "" if point.step == 0 else f"{point.loss:.5f}"
                rate = f"{point.tokens_per_step:.4f}"
                rows.writerow([point.step, f"{point.seconds:.1f}", loss, rate])

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CSV_FILE, write)


def write_picture(folder: Path, curve: Sequence[CurvePoint]) -> bool:
    """Draw tokens per step and loss over the steps, above each other.

    Returns:
        True if the picture was written, False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure: Any = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.plot([p.step for p in curve], [p.tokens_per_step for p in curve], marker=".")
    best = max(curve, key=lambda point: point.tokens_per_step)
    upper.plot(best.step, best.tokens_per_step, "o", color="tab:red")
    figure.suptitle(
        f"{folder.name}, best: {best.tokens_per_step:.2f} tokens/step after {best.step:,} steps, "
        f"{best.seconds / 60:.0f} minutes"
    )
    gain = best.tokens_per_step - 1
    upper.set_ylim(1, 1 + 1.1 * (gain or 1))  # from what plain decoding has
    upper.set_ylabel("tokens/step, held-out texts")
    trained = [point for point in curve if point.step > 0]
    lower.plot([p.step for p in trained], [p.loss for p in trained], marker=".", color="tab:orange")
    lower.set_ylim(0, 1.1 * max((p.loss for p in trained), default=1))
    lower.set_ylabel("training loss, nats")
    lower.set_xlabel("steps of training")
    lower.set_xlim(left=0)
    write_atomically(folder / PNG_FILE, lambda path: figure.savefig(path, dpi=120))
    return True

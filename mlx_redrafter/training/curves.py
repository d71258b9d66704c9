"""The curves of a run as a table, and as a picture where matplotlib is installed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint import write_atomically
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
    """Draw loss and tokens per step over the steps.

    Returns:
        True if the picture was written, False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    trained = [point for point in curve if point.step > 0]
    left.plot([p.step for p in trained], [p.loss for p in trained], color="tab:orange")
    right.plot([p.step for p in curve], [p.tokens_per_step for p in curve], color="tab:blue")
    left.set_xlabel("step")
    left.set_ylabel("training loss (nats)", color="tab:orange")
    right.set_ylabel("tokens/step on held-out text (simulated)", color="tab:blue")
    write_atomically(folder / PNG_FILE, lambda path: figure.savefig(path, dpi=120))
    return True

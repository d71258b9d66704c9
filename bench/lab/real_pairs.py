"""The default beside eight fixed shapes on a real pair: sequences in a row with the same drafter.

    python -m mlx_redrafter.bench.lab.real_pairs TARGET DRAFTER PROMPTS [TEMPERATURE [TOKENS]]

PROMPTS is a file of eight paragraphs. Runs are interleaved: every arm decodes a paragraph before
the next one. Needs a quiet machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mlx_redrafter import load
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.learned_state import LearnedState

# Beam width, beam length and nodes of the fixed shapes.
SHAPES = ((1, 3, 3), (1, 4, 4), (1, 6, 6), (1, 8, 8), (2, 4, 6), (2, 6, 16), (3, 6, 16), (4, 5, 16))


def main(target: str, drafter: str, prompts: Path, temperature: float, tokens: int) -> None:
    """Print the median speed of each arm, as a multiple of plain decoding's."""
    model, tokenizer, network = load(target, drafter=drafter)
    timed: Any = {}
    arms: dict[str, tuple[Engine, dict[str, Any]]] = {
        "plain": (Engine(model, tokenizer, None), {}),
        "default": (Engine(model, tokenizer, network, LearnedState(timed=timed)), {}),
    }
    names = ("beam_width", "beam_length", "tree_nodes")
    for shape in SHAPES:
        engine = Engine(model, tokenizer, network, LearnedState(timed=timed))
        arms["x".join(map(str, shape))] = engine, dict(zip(names, shape, strict=True))
    texts = prompts.read_text(encoding="utf-8").split("\n\n")
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for text in (texts[0], *texts[:8]):  # the first one warms up
        for name, (engine, plan) in arms.items():
            start, count = 0.0, -1
            for _ in engine.stream(text, max_tokens=tokens, temp=temperature, seed=1, **plan):
                start, count = start or time.perf_counter(), count + 1
            speeds[name].append(count / (time.perf_counter() - start))
    plain = np.array(speeds["plain"][1:])
    ratios = {name: np.array(values[1:]) / plain for name, values in speeds.items()}
    best = max(
        ratios, key=lambda name: 0.0 if name == "default" else float(np.median(ratios[name]))
    )
    for name, values in ratios.items():
        sys.stdout.write(f"{name:<10} {np.median(values):.2f}  {np.round(values, 2).tolist()}\n")
    share = np.median(ratios["default"] / ratios[best])
    sys.stdout.write(f"default over {best}: {share:.3f}\n")


if __name__ == "__main__":
    folder, other, paragraphs, *rest = sys.argv[1:]
    numbers = [float(value) for value in rest] + [0.0, 96.0][len(rest) :]
    main(folder, other, Path(paragraphs), numbers[0], int(numbers[1]))

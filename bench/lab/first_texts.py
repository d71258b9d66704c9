"""The first text of a process: the default beside fixed shapes, on real pairs.

    python -m mlx_redrafter.bench.lab.first_texts PAIRS.json OUT --texts 7

PAIRS.json is that of `real_pairs`. For each pair and temperature, one process learns from three
texts by the default, and stores its estimates in OUT. Then each further text has a process of its
own, which decodes it by the default at once, and by plain decoding and the fixed shapes after a
warm-up. Prints a line for each pair and temperature. Needs a quiet machine.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_redrafter.bench.lab.real_pairs import WARM_UP, Methods, choose_pairs, make_parser
from mlx_redrafter.errors import RedrafterError

# Texts that the first process learns from.
LEARNED = 3
DEFAULT, PLAIN = "default", "plain"


def learn(pair: dict[str, Any], folder: Path, temp: float, tokens: int) -> None:
    """Decode the first texts by the default, which stores what it has learned."""
    methods = Methods(pair, folder)
    for seed, prompt in enumerate(methods.encode_prompts(LEARNED)):
        methods.decode(prompt, tokens, temp, seed, [DEFAULT])


def measure(
    pair: dict[str, Any], folder: Path, temp: float, tokens: int, number: int
) -> dict[str, float]:
    """Decode one of the texts after those, from 1, as the first of this process.

    Return the speeds of all methods, in tokens/s.
    """
    methods, seed = Methods(pair, folder), LEARNED + number
    prompt, others = methods.encode_prompts(seed)[-1], [PLAIN, *methods.plans]
    first, text = methods.decode(prompt, tokens, temp, seed, [DEFAULT])
    methods.decode(prompt, WARM_UP, temp, seed, others)
    speeds, expected = methods.decode(prompt, tokens, temp, seed, others)
    if text != expected:
        raise RedrafterError("the text of the default differs from plain decoding")
    return speeds | first


def summarise(speeds: list[dict[str, float]]) -> str:
    """Compare the default with plain decoding, and with the shape that is best for all texts."""
    names = [name for name in speeds[0] if name not in (DEFAULT, PLAIN)]
    total = {name: sum(one[name] / one[PLAIN] for one in speeds) for name in names}
    best = max(total, key=total.__getitem__)
    parts = []
    for name in (PLAIN, best):
        found = [one[DEFAULT] / one[name] for one in speeds]
        parts.append(f"{np.median(found):.2f} of {name} ({min(found):.2f} to {max(found):.2f})")
    return f"{'; '.join(parts)}; {best} has {total[best] / len(speeds):.2f} of {PLAIN}"


def main() -> None:
    """Parse the options, and measure pairs, each text in a process of its own."""
    given = make_parser(texts=7, tokens=64).parse_args()
    spawn = multiprocessing.get_context("spawn")
    for pair, temp in choose_pairs(given.pairs, given.out, given.temps, given.only):
        conditions = pair, given.pairs.parent, temp, given.tokens
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            pool.submit(learn, *conditions).result()
            numbers = range(1, given.texts + 1)
            speeds = list(pool.map(partial(measure, *conditions), numbers))
        print(f"{pair['name']}, T {temp:g}, {given.texts} texts: {summarise(speeds)}", flush=True)


if __name__ == "__main__":
    main()

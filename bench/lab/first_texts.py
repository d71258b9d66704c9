"""The first text of a process: the default beside fixed shapes, on real pairs.

    python -m mlx_redrafter.bench.lab.first_texts PAIRS.json OUT --texts 7

PAIRS.json is that of `real_pairs`. For each pair and temperature, one process learns from three
texts by the default, and stores its estimates in OUT. Then each further text has a process of its
own, which decodes it by the default at once, and by plain decoding and the fixed shapes after a
warm-up. Prints a line for each pair and temperature. Needs a quiet machine.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from mlx_redrafter.bench.lab.real_pairs import WARM_UP, Methods
from mlx_redrafter.bench.prompts import read_prompts, select_prompts
from mlx_redrafter.errors import RedrafterError

# Texts that the first process learns from.
LEARNED = 3
DEFAULT, PLAIN = "default", "plain"


def decode(pair: dict[str, str], folder: Path, temp: float, tokens: int, number: int) -> None:
    """Learn from texts, number 0, or print the speeds of all methods on a further text."""
    methods = Methods(pair, folder)
    prompts = [
        methods.tokenizer.encode(prompt.text)
        for prompt in select_prompts(read_prompts(folder / pair["prompts"]), LEARNED + number)
    ]
    if number == 0:
        for seed, prompt in enumerate(prompts):
            methods.decode(prompt, tokens, temp, seed, [DEFAULT])
        return
    seed, others = LEARNED + number, [PLAIN, *methods.plans]
    first, text = methods.decode(prompts[-1], tokens, temp, seed, [DEFAULT])
    methods.decode(prompts[-1], WARM_UP, temp, seed, others)
    speeds, expected = methods.decode(prompts[-1], tokens, temp, seed, others)
    if text != expected:
        raise RedrafterError("the text of the default differs from plain decoding")
    print(json.dumps(speeds | first))


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


def run(
    pairs: Path, out: Path, temps: list[float], texts: int, only: list[str], command: list[str]
) -> None:
    """Measure pairs, each text in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    # Step times and estimates are stored there.
    environment = {**os.environ, "XDG_CACHE_HOME": str(out.resolve())}
    for pair in json.loads(pairs.read_text()):
        for temp in temps if not only or pair["name"] in only else []:
            speeds = []
            for number in range(texts + 1):
                words = ["--child", json.dumps(pair), "--temps", str(temp), "--number", str(number)]
                ended = subprocess.run(
                    [*command, *words], env=environment, stdout=subprocess.PIPE, check=True
                )
                speeds += [json.loads(line) for line in ended.stdout.splitlines()]
            print(f"{pair['name']}, T {temp:g}, {texts} texts: {summarise(speeds)}", flush=True)


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temps", default="0,1")
    parser.add_argument("--only", default="", help="names of pairs, with commas")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    temps = [float(temp) for temp in given.temps.split(",")]
    if given.child is not None:
        decode(json.loads(given.child), given.pairs.parent, temps[0], given.tokens, given.number)
        return
    names = [name for name in given.only.split(",") if name]
    own = [str(given.pairs), str(given.out), "--tokens", str(given.tokens)]
    command = [sys.executable, "-m", "mlx_redrafter.bench.lab.first_texts", *own]
    run(given.pairs, given.out, temps, given.texts, names, command)


if __name__ == "__main__":
    main()

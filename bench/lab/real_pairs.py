"""The default beside fixed shapes on real pairs: texts in a row with the same drafter.

    python -m mlx_redrafter.bench.lab.real_pairs PAIRS.json OUT --texts 8 --minutes 30

PAIRS.json is a list of pairs, in the order to measure: objects with "name", "target", "drafter"
(folders beside the file, or "lookup") and "prompts" (a file beside it). OUT receives one file per
pair and temperature; a pair with such a file is not measured again. Step times are stored in OUT,
too, and not shared with other runs. Then a table of all files in OUT is printed.

Runs are interleaved: all methods decode a text before the next one begins, each time in another
order. After every second text the slower half of the fixed shapes leaves, until two are left. Needs
a quiet machine.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_redrafter import load
from mlx_redrafter.bench.prompts import read_prompts, select_prompts
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.learned_state import LearnedState
from mlx_redrafter.errors import RedrafterError

# Fixed shapes; a drafter whose beams are shorter drafts as far as it does.
SHAPES = tuple(
    DraftPlan.of(*sizes)
    for sizes in (
        (1, 3, 3), (1, 4, 4), (1, 6, 6), (1, 8, 8), (2, 4, 6), (2, 6, 16), (3, 6, 16), (4, 5, 16)
    )
)  # fmt: skip
# Number of texts after which the slower half of the shapes leaves.
HEAT = 2
# Tokens of the warm-up of every method.
WARM_UP = 24


@dataclass
class Result:
    """Speeds of a pair at a temperature: for each text, tokens/s after the first, by method.

    ``load`` is that of the machine at the beginning, in processes.
    """

    name: str
    temp: float
    load: float
    seconds: float = 0.0
    speeds: list[dict[str, float]] = field(default_factory=list)

    def row(self) -> str:
        """Format the result as a row of the table."""
        last = self.speeds[-1]
        means = {
            name: self._mean(name, "plain") for name in last if name not in ("plain", "default")
        }
        best = max(means, key=means.__getitem__)
        least = min(one["default"] / one["plain"] for one in self.speeds)
        return (
            f"{self.name:<24}{self.temp:>5g}{len(self.speeds):>6}{self._mean('default'):>9.2f}"
            f"{best:>9}{means[best]:>6.2f}{self._mean('default', best):>14.3f}{least:>12.2f}"
            f"{min(one['default'] / one[best] for one in self.speeds):>12.2f}"
            f"{last['plain']:>9.1f}{self.load:>6.1f}{self.seconds:>6.0f}"
        )

    def _mean(self, name: str, reference: str = "plain") -> float:
        ratios = [one[name] / one[reference] for one in self.speeds if name in one]
        return float(np.exp(np.mean(np.log(ratios))))


HEADING = (
    "pair                     temp texts  default     best        default/best  least text  "
    "of the best  plain/s  load     s"
)


class Methods:
    """All methods of decoding for an entry of PAIRS.json; each has its own memory."""

    def __init__(self, pair: Mapping[str, Any], folder: Path):
        drafter = pair["drafter"]
        loaded = load(
            str(folder / pair["target"]),
            drafter=drafter if drafter == "lookup" else str(folder / drafter),
        )
        self.model, self.tokenizer, self.drafter = loaded
        longest = getattr(self.drafter, "max_length", None)
        shapes = {plan.within(longest) for plan in SHAPES}
        self.plans = {
            f"{plan.shape.width}x{plan.shape.length}/{plan.num_nodes}": plan.options
            for plan in sorted(shapes, key=lambda plan: (plan.num_nodes, plan.shape.length))
        }
        self._prompts = read_prompts(folder / pair["prompts"])
        self._timed: Any = {}
        self.forget()

    def encode_prompts(self, count: int) -> list[list[int]]:
        """Encode the first prompts, from all categories alternately, without a chat template."""
        chosen = select_prompts(self._prompts, count)
        return [self.tokenizer.encode(prompt.text) for prompt in chosen]

    def forget(self) -> None:
        """Forget all that was learnt except the step times."""
        self._engines = {
            name: self._engine(None if name == "plain" else self.drafter)
            for name in ("plain", "default", *self.plans)
        }

    def names(self, shift: int) -> list[str]:
        """Return the methods that are left, beginning with another one for each shift."""
        names = [name for name in self._engines if name in ("plain", "default", *self.plans)]
        shift %= len(names)
        return names[shift:] + names[:shift]

    def decode(
        self, prompt: list[int], max_tokens: int, temp: float, seed: int, names: Sequence[str]
    ) -> tuple[dict[str, float], list[int]]:
        """Return the speeds of methods, in tokens/s after the first, and the text of them all."""
        speeds: dict[str, float] = {}
        texts: list[list[int]] = []
        for name in names:
            times, text = [], []
            for response in self._engines[name].stream(
                prompt, max_tokens=max_tokens, temp=temp, seed=seed, **self.plans.get(name, {})
            ):
                times.append(time.perf_counter())
                text.append(response.token)
            if len(times) < 2:
                raise RedrafterError(
                    "expected a text of two tokens or more, found one: drop its prompt"
                )
            speeds[name] = (len(times) - 1) / (times[-1] - times[0])
            texts.append(text)
            if text != texts[0]:
                raise RedrafterError(f"the texts of {names[0]} and {name} differ")
        return speeds, texts[0]

    def _engine(self, drafter: Any) -> Engine:
        return Engine(self.model, self.tokenizer, drafter, LearnedState(timed=self._timed))


def measure(pair: Mapping[str, Any], folder: Path, temp: float, texts: int, tokens: int) -> Result:
    """Decode texts with all methods."""
    result = Result(pair["name"], temp, os.getloadavg()[0])
    start = time.perf_counter()
    methods = Methods(pair, folder)
    prompts = methods.encode_prompts(texts)
    methods.decode(prompts[0], WARM_UP, temp, 0, methods.names(0))
    methods.forget()
    for number, prompt in enumerate(prompts):
        names = methods.names(number)
        result.speeds.append(methods.decode(prompt, tokens, temp, number + 1, names)[0])
        if (number + 1) % HEAT == 0 and len(methods.plans) > HEAT:
            total = {
                name: sum(one[name] / one["plain"] for one in result.speeds)
                for name in methods.plans
            }
            left = sorted(total, key=total.__getitem__)[len(total) // 2 :]
            methods.plans = {name: methods.plans[name] for name in left}
    result.seconds = time.perf_counter() - start
    return result


def choose_pairs(
    pairs: Path, out: Path, temps: list[float], names: list[str]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield pairs of a list, by default all, at each temperature.

    This process, and those that it starts, store step times and estimates in ``out`` from then on.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(out.resolve())
    for pair in json.loads(pairs.read_text()):
        for temp in temps if not names or pair["name"] in names else []:
            yield pair, temp


def make_parser(texts: int, tokens: int) -> argparse.ArgumentParser:
    """Make a parser of the options that measurements of pairs share, given the default sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=texts)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--temps", type=_numbers, default="0,1")
    parser.add_argument("--only", type=_names, default="", help="names of pairs, with commas")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(
    pairs: Path, out: Path, temps: list[float], minutes: float, names: list[str], **options: Any
) -> None:
    """Measure the pairs that have no file yet, until the time is spent; print the table."""
    deadline = time.perf_counter() + 60 * minutes
    for pair, temp in choose_pairs(pairs, out, temps, names):
        path = out / f"{pair['name']} {temp:g}.json".replace(" ", "-")
        if path.exists() or time.perf_counter() > deadline:
            continue
        try:
            result = measure(pair, pairs.parent, temp, **options)
        except RedrafterError as error:  # such as a drafter that is not there yet
            print(f"{pair['name']}: FAILED: {error}", flush=True)
            continue
        path.write_text(json.dumps(asdict(result)))
        print(result.row(), flush=True)
    print(f"\n{HEADING}")
    for path in sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime):
        print(Result(**json.loads(path.read_text())).row())


def main() -> None:
    """Parse the options and run."""
    parser = make_parser(texts=8, tokens=96)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no pair afterwards")
    given = parser.parse_args()
    options = {"texts": given.texts, "tokens": given.tokens}
    run(given.pairs, given.out, given.temps, given.minutes, given.only, **options)


if __name__ == "__main__":
    main()

"""A script for ranks: texts of a model in a folder on all of them, timed or with a fault.

python -m mlx_redrafter.bench.lab.machine_text WORK MODEL [DRAFTER]

WORK is "time", "write", or the fault of the last rank: "fail", "hang", "versions", "not finite".
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.machines import leader
from mlx_redrafter.machines.following import Follower
from mlx_redrafter.machines.line import Do, Frame
from mlx_redrafter.machines.meeting import Rank

# Passes of a rank before its fault.
PASSES = 30
# Limit of a pass in seconds where a rank hangs, instead of minutes.
PASS_SECONDS = 3.0
# Number of timed texts of each kind.
TEXTS = 4
# Tokens of a timed text.
TOKENS = 40
# Drafts of the timed texts: a chain.
CHAIN = {"beam_width": 1, "beam_length": 5, "tree_nodes": 5}
# Token ids of a prompt, which any vocabulary has.
PROMPT = [1, 403, 407, 261]


def write(work: str, folder: str) -> None:
    """Write a text without end, or one that ends in another way."""
    model, tokenizer, _ = load(folder, group=mx.distributed.init())
    engine = Engine(model, tokenizer, None)
    if work == "not finite":
        try:
            engine.generate(PROMPT, max_tokens=100, logits_processors=[_spoil])
        except RedrafterError as error:
            print(f"the text's own error: {error}", flush=True)
    count = 40 if work == "not finite" else 10**6
    for number, _ in enumerate(_endless(engine, count)):
        if number == 3:
            print("writing", flush=True)
    print("written", flush=True)


def time_texts(folder: str, drafter: str) -> dict[str, Any]:
    """Time plain and drafted texts, one after the other; times are lower quartiles."""
    model, tokenizer, network = load(folder, drafter, group=mx.distributed.init())
    plain, drafted = Engine(model, tokenizer, None), Engine(model, tokenizer, network)
    steps: dict[str, list[float]] = {"plain": [], "drafted": []}
    texts: dict[str, list[int]] = {}
    per_step = 1.0
    for _ in range(TEXTS):
        texts["plain"], _ = _time_steps(plain, {}, steps["plain"])
        texts["drafted"], per_step = _time_steps(drafted, CHAIN, steps["drafted"])
    token, step = (_quartile(steps[name]) for name in ("plain", "drafted"))
    return {
        "plain_ms": 1e3 * token,
        "drafted_ms": 1e3 * step,
        "tokens_per_step": per_step,
        "gain": token * per_step / step,
        "is_equal": texts["plain"] == texts["drafted"],
    }


def _time_steps(
    engine: Engine, plan: dict[str, Any], steps: list[float]
) -> tuple[list[int], float]:
    """Write a text; add the seconds of its steps, and return its tokens and tokens per step."""
    tokens, number, last = [], 0, 0.0
    for response in engine.stream(PROMPT, max_tokens=TOKENS, temp=0, **plan):
        tokens.append(response.token)
        if response.steps != number:
            number, before, last = response.steps, last, time.perf_counter()
            if number > 2:
                steps.append(last - before)
    return tokens, (len(tokens) - 1) / number


def _quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def _endless(engine: Engine, count: int) -> Iterator[Any]:
    """Write texts one after the other, of ``count`` tokens in all, none longer than its model."""
    while count > 0:
        part = min(count, 400)
        yield from engine.stream(PROMPT, max_tokens=part, temp=1.0)
        count -= part


def _spoil(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits * mx.nan if tokens.size > PASSES else logits


def _break_rank(fault: str) -> None:
    """Give this rank a fault."""
    stock, passes = Follower.obey, iter(range(PASSES))
    own = Rank.own

    def obey(self: Follower, frame: Frame) -> None:
        if frame.do is Do.ADVANCE and next(passes, None) is None:
            if fault == "fail":
                raise MemoryError("no memory for a buffer of 12 GB")
            time.sleep(1000)
        stock(self, frame)

    if fault in ("fail", "hang"):
        Follower.obey = obey  # type: ignore[method-assign]
    if fault == "versions":
        Rank.own = lambda rank: replace(own(rank), versions=("0.1", "0.2", "0.3"))  # type: ignore[method-assign]


def main(work: str, folder: str, drafter: str = "") -> None:
    """Do the work on this rank."""
    group = mx.distributed.init()
    if work == "hang":
        leader.PASS_SECONDS = PASS_SECONDS
    if group.rank() == group.size() - 1:
        _break_rank(work)
    if work == "time":
        print(json.dumps(time_texts(folder, drafter)), flush=True)
    else:
        write(work, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

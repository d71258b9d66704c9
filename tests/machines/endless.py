"""A script for ranks: an endless text of a model in a folder, and faults in the middle of it.

python -m tests.machines.endless FOLDER [fail|hang|versions|not finite|slow]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_redrafter import Engine, RedrafterError, load
from mlx_redrafter.machines import leading, meeting
from mlx_redrafter.machines.following import Follower
from mlx_redrafter.machines.frames import Do, Frame

# Passes of a follower before its fault.
PASSES = 30


def _fail_later(self: Follower, frame: Frame, stock: Any, fault: str, seen: list[int]) -> None:
    seen.append(1)
    if len(seen) > PASSES and frame.do is Do.ADVANCE:
        if fault == "fail":
            raise MemoryError("no memory for a buffer of 12 GB")
        time.sleep(0.003 if fault == "slow" else 1000)
    stock(self, frame)


def _not_finite(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits * mx.nan if tokens.size > PASSES else logits


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: str, fault: str = "") -> None:
    """Write without end on rank 0."""
    group = mx.distributed.init()
    if group.rank() and fault in ("fail", "hang", "slow"):
        call = partial(_fail_later, stock=Follower.obey, fault=fault, seen=[])
        Follower.obey = lambda self, frame: call(self, frame)  # type: ignore[method-assign]
    if group.rank() and fault == "versions":
        own = meeting.Rank.own
        meeting.Rank.own = classmethod(  # type: ignore[method-assign, assignment]
            lambda cls, rank: replace(own(rank), versions=("0.1", "0.2", "0.3"))
        )
    leading.PASS_SECONDS = 3.0
    model, tokenizer, _ = load(folder, group=group)
    engine = Engine(model, tokenizer, None)
    if fault == "not finite":
        try:
            engine.generate([1, 2, 3], max_tokens=100, logits_processors=[_not_finite])
        except RedrafterError as error:
            say(f"the text's own error: {error}")
    options = {"max_tokens": 40 if fault in ("slow", "not finite") else 10**6, "temp": 0.0}
    for number, _ in enumerate(engine.stream([1, 2, 3], **options)):
        if number == 3:
            say("writing")
    say("written")


if __name__ == "__main__":
    main(*sys.argv[1:])

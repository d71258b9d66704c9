"""Work of the engine before the prefill of a request.

The prompt's forward pass and the tokenizer are left out: prompts are token ids, and the stream is
opened but not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_redrafter.bench.lab.rounds import take_turns
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, timed
from mlx_redrafter.engine.engine import AnyDrafter, Engine
from mlx_redrafter.engine.generation import stream_generate

# Rounds that are not recorded.
WARM_UP = 3


def measure_request(
    model: nn.Module,
    tokenizer: Any,
    drafter: AnyDrafter,
    prompt: Sequence[int],
    rounds: int = 50,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, MedianEstimate]:
    """Time the ways to open a stream in interleaved rounds, in seconds by name.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        drafter: Its drafter.
        prompt: Token ids.
        rounds: Rounds to record.
        on_progress: Callback for the number of rounds done and their total.
    """
    engine = Engine(model, tokenizer, drafter)
    begin: dict[str, Callable[[], Any]] = {
        "Engine.stream": partial(engine.stream, prompt),
        "stream_generate": partial(stream_generate, model, tokenizer, prompt, drafter=drafter),
        "Engine": partial(Engine, model, tokenizer, drafter),
    }
    jobs = {name: partial(timed, work) for name, work in begin.items()}
    samples = take_turns(jobs, rounds, WARM_UP, on_progress=on_progress)
    return {name: estimate(values) for name, values in samples.items()}

"""Interleaved runs of several decoding methods on the same batches, recorded in a file."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import Arm, CommonSettings, TimedRun, Turn, run_together
from mlx_redrafter.bench.timing import OnProgress, rotated
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.stored_costs import Setting, contexts, step_costs, time_steps
from mlx_redrafter.machines.leading import target_of
from mlx_redrafter.proposers.lookup import Lookup

# Maximum number of prompt tokens that a method is warmed up with.
WARM_UP_PROMPT = 512
# Number of tokens of the texts that warm a method up.
WARM_UP_TOKENS = 8

# The texts of a batch, each with its times.
TimedTexts = list[tuple[TimedRun, str]]
# A method that decodes a batch and times it.
Method = Callable[[Sequence[Turn]], TimedTexts]


def one_by_one(name: str, arm: Arm, batch: Sequence[Turn]) -> TimedTexts:
    """Decode the texts of a batch one after the other."""
    stream = (
        (number, response) for number, turn in enumerate(batch) for response in arm(turn.prompt.ids)
    )
    return run_together(name, stream, batch)


def runs_of(found: Mapping[str, TimedTexts]) -> list[TimedRun]:
    return [run for texts in found.values() for run, _ in texts]


@dataclass(frozen=True)
class Interleaving:
    """Batches that the same methods decode in turns.

    ``make_methods`` makes the methods, by name, for settings, and ``finish`` the runs to record
    from the texts of all methods.
    """

    make_methods: Callable[[CommonSettings], Mapping[str, Method]]
    settings: CommonSettings
    batches: Sequence[Sequence[Turn]]
    finish: Callable[[Mapping[str, TimedTexts]], list[TimedRun]] = runs_of


def decode_in_turns(
    parts: Sequence[Interleaving],
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Decode every batch with every method; each batch starts with another method.

    Batches that the recording has are not repeated. If any is missing, ``prepare`` is called first.
    """
    missing = [[one for one in part.batches if not recording.has(one[0].key)] for part in parts]
    total = sum(len(part.batches) for part in parts)
    done = total - sum(map(len, missing))
    if done < total:
        prepare()
    for part, batches in zip(parts, missing, strict=True):
        methods = part.make_methods(part.settings) if batches else {}
        for number, batch in enumerate(batches):
            on_progress(done, total)
            if number == 0:
                _warm_up(part, batch)
            found = {}
            for name in rotated(list(methods), done + batch[0].repeat):
                time.sleep(cool_down)
                found[name] = methods[name](batch)
            # Tables have the methods in the order of their first runs.
            recording.add(part.finish({name: found[name] for name in methods}))
            done += 1
    on_progress(total, total)


def _warm_up(part: Interleaving, batch: Sequence[Turn]) -> None:
    """Let every method compile and allocate, with the beginnings of a batch's prompts.

    The whole prompts would be in the servers' caches afterwards.
    """
    short = []
    for turn in batch:
        ids, text = turn.prompt.ids[:WARM_UP_PROMPT], turn.prompt.text[:WARM_UP_PROMPT]
        short.append(replace(turn, prompt=replace(turn.prompt, ids=ids, text=text)))
    for method in part.make_methods(replace(part.settings, max_tokens=WARM_UP_TOKENS)).values():
        method(short)


def arm_name(plan: DraftPlan) -> str:
    """Name a plan for tables and result files, such as "top_n w4 l5 n9"."""
    nodes = "" if plan.shape.select == "beam" else f" n{plan.num_nodes}"
    return f"{plan.shape.select} w{plan.shape.width} l{plan.shape.length}{nodes}"


def time_shapes(settings: CommonSettings, longest: int, recording: Recording) -> None:
    """Time the steps that `auto` chooses from, and record the seconds of that.

    The library does this once per model and machine; no answer's time includes it. ``longest`` is
    the length of the longest prompt, in tokens.
    """
    target = target_of(settings.model)
    network = None if isinstance(settings.drafter, Lookup) else settings.drafter
    start = time.perf_counter()
    for context in contexts(target, longest):
        time_steps(Setting(target, network, context))
    recording.result["calibration_seconds"] = time.perf_counter() - start
    step_costs(target, network, longest)

"""Compare decoding methods with mlx-lm on questions by task: plain, and drafters with their shapes.

It prints a Markdown table for each temperature: tokens per step, and speed relative to mlx-lm, of
all questions and of each task. The exit code is 1 if a text differs from the target's own.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.lab.options import add_out, at_least
from mlx_redrafter.bench.prompts import describe_prompts, encode_prompts, read_prompts
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, divide, num_different, summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    CommonSettings,
    EncodedPrompt,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.turns import (
    Interleaving,
    Method,
    arm_name,
    decode_in_turns,
    one_by_one,
    time_shapes,
)
from mlx_redrafter.checkpoints.bundled import checkpoint_name
from mlx_redrafter.cli.bench_options import Rounds
from mlx_redrafter.cli.bench_output import parse_shapes, parse_temps, progress, refuse_texts
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

# Methods by the name of their drafter: the drafter, and its fixed shapes beside the default.
Drafters = Mapping[str, tuple[Any, Sequence[DraftPlan]]]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or repository of the target; default: bundled")
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="DRAFTER[=SHAPES]",
        help="lookup or a folder, with fixed shapes beside the default, such as 1x5,4x5x9,beam:4x5",
    )
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl file")
    parser.add_argument("--per-task", type=at_least(1), default=20, help="questions of each task")
    parser.add_argument("--temps", default="0,0.7,1", help="temperatures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-m", "--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--repeats", type=at_least(1), default=1, help="rounds per question")
    parser.add_argument("--cool-down", type=float, default=0.0, help="seconds before a run")
    parser.add_argument(
        "--max-repeated",
        type=float,
        default=1.0,
        help="maximum share of repeated 4-grams; texts with more do not count",
    )
    add_out(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")


def run(arguments: Namespace) -> None:
    temps = parse_temps(arguments.temps)
    rounds = Rounds(arguments.max_tokens, arguments.repeats, arguments.cool_down)
    model, tokenizer, drafters = _load(arguments.model, arguments.drafter)
    prompts = _choose(tokenizer, arguments)
    configuration = {
        "model": checkpoint_name(arguments.model),
        "drafters": {name: list(map(arm_name, plans)) for name, (_, plans) in drafters.items()},
        **describe_prompts(arguments.prompts, prompts),
        **asdict(rounds),
        "seed": arguments.seed,
    }
    recording = Recording(arguments.out, "methods", configuration, arguments.resume)
    first, _ = next(iter(drafters.values()))  # each method of a drafter has its own
    seed = SamplingParams(seed=arguments.seed).seed
    common = CommonSettings(model, tokenizer, first, rounds.max_tokens, seed=seed)
    parts = []
    for temp in temps:
        turns = [
            [Turn(f"T {temp:g}", 0, prompt, repeat)]
            for repeat in range(rounds.repeats)
            for prompt in prompts
        ]
        make = partial(_methods, drafters=drafters)
        parts.append(Interleaving(make, replace(common, temp=temp), turns))
    longest = max(len(prompt.ids) for prompt in prompts)

    def prepare() -> None:
        for drafter, _ in drafters.values():
            time_shapes(replace(common, drafter=drafter), longest, recording)

    with progress("Questions") as show:

        def on_progress(done: int, total: int) -> None:
            show(done, total)
            if not sys.stderr.isatty():
                print(f"{done} of {total} questions", file=sys.stderr, flush=True)

        decode_in_turns(parts, recording, rounds.cool_down, on_progress, prepare)
    rows = []
    for part in parts:
        group = part.batches[0][0].group
        runs = [one for one in recording.runs if one.group == group]
        found = {
            task: summarise(own, part.settings.temp, arguments.max_repeated)
            for task, own in divide(runs).items()
        }
        print(f"\n{group}, {len(prompts)} questions\n\n{_table(found)}", flush=True)
        rows += [replace(row, setting=group) for row in found[""]]
    recording.finish(rows=rows)
    refuse_texts(num_different(rows))


def _load(model: str | None, given: Sequence[str]) -> tuple[Any, Any, Drafters]:
    drafters: dict[str, tuple[Any, Sequence[DraftPlan]]] = {}
    for one in given:
        folder, _, shapes = one.partition("=")
        name = checkpoint_name(folder)
        if name in drafters:
            raise ConfigError(f"two drafters are called {name}; rename one of the folders")
        # Each drafter comes with a copy of the target, of which the last is kept.
        target, tokenizer, drafter = Pair(model, folder).load()
        drafters[name] = drafter, parse_shapes(shapes) if shapes else ()
    return target, tokenizer, drafters


def _choose(tokenizer: Any, arguments: Namespace) -> list[EncodedPrompt]:
    """Choose the first questions of each task, and encode them."""
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in read_prompts(arguments.prompts):
        counts[prompt.category] += 1
        if counts[prompt.category] <= arguments.per_task:
            chosen.append(prompt)
    return encode_prompts(tokenizer, chosen)


def _methods(settings: CommonSettings, drafters: Drafters) -> dict[str, Method]:
    arms = {STOCK: stock_arm(settings), PLAIN: plain_arm(settings)}
    for name, (drafter, plans) in drafters.items():
        own = replace(settings, drafter=drafter)
        arms |= {f"{name}, {arm_name(plan)}": drafted_arm(own, plan) for plan in plans}
        arms[f"{name}, {AUTO}"] = drafted_arm(own, None)
    return {name: partial(one_by_one, name, arm) for name, arm in arms.items()}


def _table(found: Mapping[str, Sequence[Row]]) -> str:
    tasks = [task for task in found if task]
    columns = ["method", "tokens/step", "times mlx-lm", "interval", *tasks, "different"]
    lines = [columns, ["---"] * len(columns)]
    for number, row in enumerate(found[""]):
        lines.append(
            [
                row.arm,
                f"{row.tokens_per_step or 1:.2f}",
                _speed(row),
                row.speedup.span() if row.speedup else "",
                *(_speed(found[task][number]) for task in tasks),
                str(row.num_different or 0),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(row: Row) -> str:
    return f"{row.speedup.median:.2f}" if row.speedup else ""

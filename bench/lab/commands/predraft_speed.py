"""Measure decoding with and without speculative speculative decoding, on the same prompts.

The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial

from mlx_redrafter.bench.lab.arms import compared_arms, decode_in_turns, make_turns
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_prompts,
    add_rounds,
    add_sampling,
    at_least,
    begin_recording,
    load_pair,
    make_settings,
    read_given_prompts,
)
from mlx_redrafter.bench.report import num_different, summarise
from mlx_redrafter.bench.runs import AUTO, drafted_arm
from mlx_redrafter.bench.turns import arm_name, reference_arm, time_shapes
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, show_speeds, warn
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.speculate_ahead import Hits, SpeculateAhead

PLANS = (DraftPlan.of(4, 5, select="beam"), DraftPlan.of(4, 5))


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    add_rounds(parser, max_tokens=128, repeats=3)
    add_sampling(parser)
    parser.add_argument("--predraft", type=at_least(1), default=8, help="outcomes to draft for")
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    target, tokenizer, drafter = load_pair(arguments)
    encoded = read_given_prompts(arguments, tokenizer)
    settings = make_settings(arguments, target, tokenizer, drafter)
    arms = compared_arms(settings, PLANS)
    hits: dict[str, Hits] = {}
    for plan in (*PLANS, None):
        name = f"{AUTO if plan is None else arm_name(plan)}, predrafted"
        ahead = SpeculateAhead(drafter, arguments.predraft)
        arms[name] = drafted_arm(replace(settings, drafter=ahead), plan)
        hits[name] = ahead.hits
    more = {name: getattr(arguments, name) for name in ("temp", "seed", "predraft")}
    shapes = {arm_name(plan): plan.options for plan in PLANS}
    recording = begin_recording("compare", arguments, drafter, encoded, shapes=shapes, **more)
    with progress("Turns") as on_progress:
        turns = make_turns(encoded, arguments.repeats)
        longest = max(len(prompt.ids) for prompt in encoded)
        prepare = partial(time_shapes, settings, longest, recording)
        decode_in_turns(arms, turns, recording, arguments.cool_down, on_progress, prepare)
    rows = summarise(recording.runs, reference_arm(settings))
    recording.finish(rows=rows, hits=hits)
    show_speeds(rows, "all prompts")
    for name, count in hits.items():
        show(f"{name}: {count.foreseen} of {count.passes} outcomes were drafted for")
    warn(recording.result["disturbances"])
    refuse_texts(num_different(rows))

"""``redrafter-mlx bench overhead``, ``memory`` and ``profile``: parts of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import PROMPT, Out, RecurrentPair, Shape, TextPrompt
from mlx_redrafter.cli.bench_output import draw, parse_ints, progress, show, warn
from mlx_redrafter.cli.model_options import NamedModel
from mlx_redrafter.cli.text_options import Temp
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.overhead import Overhead
    from mlx_redrafter.bench.profile import Profile, VerifyCost


def overhead(
    pair: RecurrentPair,
    shape: Shape,
    prompt: TextPrompt = PROMPT,
    temp: Temp = 0.0,
    rounds: Annotated[int, typer.Option(help="Triples of step, verify and draft.")] = 100,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-m", help="Tokens after which the text begins again."),
    ] = 1000,
    goal: Annotated[float, typer.Option(help="Largest share of a plain step.")] = 0.08,
    out: Out = None,
) -> None:
    """Measure what a step costs beyond draft and verify, as a share of a plain mlx-lm step.

    The exit code is 1 if the upper end of the interval is above the goal.
    """
    check_int("rounds", rounds, 2)
    check_int("max_tokens", max_tokens, 2)
    SamplingParams(temp)
    if not 0 < goal < math.inf:
        raise ConfigError(f"goal must be a share above 0, got {goal}")
    plan = shape.plan()
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.overhead import measure_overhead
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result
    from mlx_redrafter.engine.prompt_encoding import encode_question

    ids = encode_question(tokenizer, prompt, use_template=False)
    watch = LoadWatch()
    with progress("Triples") as on_progress:
        found = measure_overhead(target, drafter, ids, plan, rounds, temp, max_tokens, on_progress)
    show(_overhead_table(found), _overhead_remarks(found, plan, goal))
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        configuration = {
            **pair_names(pair.model, pair.drafter, drafter),
            **plan.options,
            "temp": temp,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompt_tokens": len(ids),
        }
        result = new_result(
            "overhead", configuration, share=found.share, found=found, disturbances=disturbances
        )
        write_result(out, result)
    if found.share.high > goal:
        raise typer.Exit(1)


@dataclass(frozen=True)
class GivenPair(RecurrentPair):
    """A pair that may be missing: a random one stands in for it."""

    model: NamedModel = None

    @property
    def is_random(self) -> bool:
        """Whether neither model nor drafter is given."""
        return self.model is None and self.drafter is None

    def load(self, **options: Any) -> tuple[Any, Any, Any]:
        """See `Pair.load`; a random pair has no tokenizer."""
        if not self.is_random:
            return super().load(**options)
        from mlx_redrafter.bench.memory import random_pair

        target, drafter = random_pair()
        return target, None, drafter


def memory(
    pair: GivenPair,
    shape: Shape,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    out: Out = None,
) -> None:
    """Measure memory against its bounds, with a random pair unless one is given.

    The exit code is 1 if a bound is broken.
    """
    check_int("prompt_tokens", prompt_tokens, 64)
    plan = shape.plan()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.memory import measure_memory
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result

    target, _, drafter = pair.load()
    watch = LoadWatch()
    with progress("Measurements") as on_progress:
        findings = measure_memory(target, drafter, plan, prompt_tokens, on_progress)
    table = Table("what", "found", "bound", "unit", "")
    for finding in findings:
        verdict = "ok" if finding.holds else "BROKEN"
        table.add_row(
            finding.name, f"{finding.found:.1f}", f"{finding.bound:.1f}", finding.unit, verdict
        )
    show(table)
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        names = ("random", "random") if pair.is_random else (pair.model, pair.drafter)
        configuration = {
            **pair_names(*names, drafter),
            **plan.options,
            "prompt_tokens": prompt_tokens,
        }
        result = new_result("memory", configuration, findings=findings, disturbances=disturbances)
        write_result(out, result)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def profile(
    pair: RecurrentPair,
    shape: Shape,
    contexts: Annotated[str, typer.Option(help="Lengths to verify at.")] = "256,1024,4000",
    tokens: Annotated[
        str, typer.Option(help="Tokens per forward pass.")
    ] = "1,2,3,4,5,6,8,9,10,12,15,16,20,24,32",
    widths: Annotated[str, typer.Option(help="Beam widths to draft with.")] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(help="Samples of each number.")] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for JSON and PNG.")
    ] = None,
) -> None:
    """Measure where a step goes: verify(T), drafting level by level, accept, commit, host."""
    check_int("rounds", rounds, 2)
    plan = shape.plan()
    lengths, sizes, beam_widths = (parse_ints(text) for text in (contexts, tokens, widths))
    target, _, drafter = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.plots import plot_profile, title
    from mlx_redrafter.bench.profile import profile as measure
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result

    watch = LoadWatch()
    with progress("Parts") as on_progress:
        found = measure(target, drafter, plan, lengths, sizes, beam_widths, rounds, on_progress)
    show(*_profile_tables(found, plan))
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        names = pair_names(pair.model, pair.drafter, drafter)
        configuration = {**names, **plan.options, "rounds": rounds}
        result = new_result("profile", configuration, found=found, disturbances=disturbances)
        write_result(out / "profile.json", result)
        draw(lambda: plot_profile(out, found, title(result, target)))


def _overhead_table(found: Overhead) -> Table:
    plain = found.parts["stock step"].median
    table = Table("part", "ms", "interval", "of a plain step")
    for name, part in [
        *found.parts.items(),
        ("overhead", found.overhead),
        ("overhead, host work included", found.unhidden),
    ]:
        interval = part.scaled(1e3).span()
        table.add_row(name, f"{part.median * 1e3:.2f}", interval, f"{part.median / plain:.1%}")
    return table


def _overhead_remarks(found: Overhead, plan: DraftPlan, goal: float) -> str:
    return (
        f"verify({plan.num_nodes})/verify(1): "
        f"{found.parts['verify'].median / found.parts['verify(1)'].median:.2f}; "
        f"draft per level: {found.parts['draft'].median / plan.shape.levels * 1e3:.2f} ms; "
        f"{found.tokens_per_step:.2f} tokens/step\n"
        f"overhead: {found.share.median:.1%} of a plain step, {found.share.span('.1%')}; "
        f"goal: at most {goal:.0%}"
    )


def _profile_tables(found: Profile, plan: DraftPlan) -> list[Table]:
    by_size: dict[int, dict[int, VerifyCost]] = {}
    for cost in found.verify:
        by_size.setdefault(cost.tokens, {})[cost.context] = cost
    contexts = list(dict.fromkeys(cost.context for cost in found.verify))
    verify = Table("T", *(f"verify(T) at {n}, ms (ratio)" for n in contexts))
    for size, costs in by_size.items():
        cells = [f"{costs[n].seconds.median * 1e3:.1f} ({costs[n].ratio:.2f})" for n in contexts]
        verify.add_row(str(size), *cells)
    lengths = sorted({cost.length for cost in found.draft})
    draft = Table("draft W", *(f"L = {length}, ms" for length in lengths))
    for width in dict.fromkeys(cost.width for cost in found.draft):
        costs_of_width = [cost for cost in found.draft if cost.width == width]
        draft.add_row(str(width), *(f"{c.seconds.median * 1e3:.2f}" for c in costs_of_width))
    step = Table(f"step, W {plan.shape.width} L {plan.shape.length} N {plan.num_nodes}", "ms")
    for name, part in {**found.step.parts, "overhead": found.step.overhead}.items():
        step.add_row(name, f"{part.median * 1e3:.2f}")
    return [verify, draft, step]

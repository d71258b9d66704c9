"""``redrafter-mlx bench overhead``, ``memory`` and ``profile``: the parts of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli import options
from mlx_redrafter.cli.bench_output import (
    BeamLength,
    BeamWidth,
    Out,
    TreeNodes,
    draw,
    load_pair,
    parse_ints,
    progress,
    show,
)
from mlx_redrafter.config import TreeShape, check_int

if TYPE_CHECKING:
    from mlx_redrafter.bench.profile import Profile, VerifyCost

PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, and the old man who lived by the sea said to his daughter:"
)


def overhead(
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", show_default=False)] = PROMPT,
    beam_width: BeamWidth = 4,
    beam_length: BeamLength = 5,
    tree_nodes: TreeNodes = None,
    temp: options.Temp = 0.0,
    rounds: Annotated[int, typer.Option(help="Triples of step, verify and draft.")] = 100,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Begin the text again after so many.")
    ] = 1000,
    goal: Annotated[float, typer.Option(help="Largest share of a plain step.")] = 0.08,
    out: Out = None,
) -> None:
    """Measure what a step costs beyond draft and verify, as a share of a plain mlx-lm step.

    The exit code is 1 where the upper end of the 95% interval is above the goal.
    """
    check_int("rounds", rounds, 2)
    check_int("max_tokens", max_tokens, 2)
    shape = TreeShape(beam_width, beam_length, tree_nodes)
    target, tokenizer, loaded = load_pair(model, drafter)
    from mlx_redrafter.bench.overhead import measure_overhead
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result

    ids = list(tokenizer.encode(prompt))
    with progress("Triples") as on_progress:
        found = measure_overhead(target, loaded, ids, shape, rounds, temp, max_tokens, on_progress)
    plain = found.parts["stock step"].median
    table = Table("part", "ms", "95% interval", "of a plain step")
    for name, part in [
        *found.parts.items(),
        ("overhead", found.overhead),
        ("overhead, host work included", found.unhidden),
    ]:
        interval = f"{part.low * 1e3:.2f} to {part.high * 1e3:.2f}"
        table.add_row(name, f"{part.median * 1e3:.2f}", interval, f"{part.median / plain:.1%}")
    show(table)
    show(
        f"verify({shape.tree_nodes})/verify(1): "
        f"{found.parts['verify'].median / found.parts['verify(1)'].median:.2f}; "
        f"draft per level: {found.parts['draft'].median / shape.draft_length * 1e3:.2f} ms; "
        f"{found.tokens_per_step:.2f} tokens/step\n"
        f"overhead: {found.share.median:.1%} of a plain step, 95% interval "
        f"{found.share.low:.1%} to {found.share.high:.1%}; goal: at most {goal:.0%}"
    )
    if out is not None:
        configuration = {
            **pair_names(model, drafter, loaded),
            **vars(shape),
            "temp": temp,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompt_tokens": len(ids),
        }
        write_result(out, new_result("overhead", configuration, share=found.share, found=found))
    if found.share.high > goal:
        raise typer.Exit(1)


def memory(
    model: options.NamedModel = None,
    drafter: options.DrafterPath = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    beam_width: BeamWidth = 4,
    beam_length: BeamLength = 5,
    tree_nodes: TreeNodes = None,
    out: Out = None,
) -> None:
    """Measure memory against its bounds, with a random pair unless one is given.

    The exit code is 1 where a bound is broken.
    """
    check_int("prompt_tokens", prompt_tokens, 64)
    shape = TreeShape(beam_width, beam_length, tree_nodes)
    from mlx_redrafter.bench.memory import measure_memory, random_pair
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result

    is_random = model is None and drafter is None
    if is_random:
        model = drafter = "random"
        target, loaded = random_pair()
    else:
        target, _, loaded = load_pair(model, drafter)
    with progress("Measurements") as on_progress:
        findings = measure_memory(target, loaded, shape, prompt_tokens, on_progress)
    table = Table("what", "found", "bound", "unit", "")
    for finding in findings:
        verdict = "ok" if finding.holds else "BROKEN"
        table.add_row(
            finding.name, f"{finding.found:.1f}", f"{finding.bound:.1f}", finding.unit, verdict
        )
    show(table)
    if out is not None:
        configuration = {
            **pair_names(model, drafter, loaded),
            **vars(shape),
            "prompt_tokens": prompt_tokens,
        }
        write_result(out, new_result("memory", configuration, findings=findings))
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def profile(
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    contexts: Annotated[str, typer.Option(help="Lengths to verify at.")] = "256,1024,4000",
    tokens: Annotated[
        str, typer.Option(help="Tokens per forward pass.")
    ] = "1,2,3,4,5,6,8,9,10,12,15,16,20,24,32",
    widths: Annotated[str, typer.Option(help="Beam widths to draft with.")] = "1,2,4,8",
    beam_width: BeamWidth = 4,
    beam_length: BeamLength = 5,
    tree_nodes: TreeNodes = None,
    rounds: Annotated[int, typer.Option(help="Samples of each number.")] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for JSON and PNG.")
    ] = None,
) -> None:
    """Measure where a step goes: verify(T), drafting level by level, accept, commit, host."""
    check_int("rounds", rounds, 2)
    shape = TreeShape(beam_width, beam_length, tree_nodes)
    lengths, sizes, beam_widths = (parse_ints(text) for text in (contexts, tokens, widths))
    target, _, loaded = load_pair(model, drafter)
    from mlx_redrafter.bench.plots import plot_profile
    from mlx_redrafter.bench.profile import profile as measure
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result

    with progress("Parts") as on_progress:
        found = measure(target, loaded, shape, lengths, sizes, beam_widths, rounds, on_progress)
    show(*_profile_tables(found, shape))
    if out is not None:
        names = pair_names(model, drafter, loaded)
        configuration = {**names, **vars(shape), "rounds": rounds}
        result = new_result("profile", configuration, found=found)
        write_result(out / "profile.json", result)
        title = f"{names['model']} on {result['machine']['processor']}"
        draw(lambda: plot_profile(out, found, title))


def _profile_tables(found: Profile, shape: TreeShape) -> list[Table]:
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
    step = Table(f"step, W {shape.beam_width} L {shape.beam_length} N {shape.tree_nodes}", "ms")
    for name, part in {**found.step.parts, "overhead": found.step.overhead}.items():
        step.add_row(name, f"{part.median * 1e3:.2f}")
    return [verify, draft, step]

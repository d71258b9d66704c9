"""``redrafter-mlx bench regret``: the default against the best fixed plan."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out, Prompts, Resume, ShortRounds
from mlx_redrafter.cli.bench_output import draw, progress, refuse_texts, show, warn
from mlx_redrafter.cli.bench_speed import speed_table
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Seed, Temp
from mlx_redrafter.generation_options import SamplingParams


def regret(
    prompts: Prompts,
    pair: Pair,
    rounds: ShortRounds,
    temp: Temp = 0.0,
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare the default with fixed plans: what would choosing by hand have gained?

    The exit code is 1 if a text is not the target's own.
    """
    SamplingParams(temp, seed=seed)
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.plots import count_texts, plot_regret, title
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.regret import measure_regret
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting

    encoded = prompts.encode(tokenizer)
    configuration = {
        **pair_names(pair.model, pair.drafter_name, drafter),
        **prompts.describe(encoded),
        **rounds.describe(),
        "temp": temp,
        "seed": seed,
    }
    setting = Setting(target, tokenizer, drafter, rounds.max_tokens, temp, seed)
    recording = Recording(out, "regret", configuration, resume)
    with progress("Turns") as on_progress:
        found = measure_regret(
            setting, encoded, rounds.repeats, recording, rounds.cool_down, rounds.max_repeated,
            on_progress,
        )  # fmt: skip
    show(speed_table(found.rows, "by mlx-lm"))
    ratio = found.ratio
    show(f"auto / {found.best}: {ratio.median:.3f}, {ratio.span('.3f') or 'one text'}")
    if out is not None:
        heading = title(recording.result, target, count_texts(configuration))
        draw(lambda: [plot_regret(out.with_suffix(".png"), found, heading)])
    warn(recording.result["disturbances"])
    refuse_texts(num_different(found.rows))


def simulate(
    scenarios: Annotated[int, typer.Option(help="Number of scenarios.")] = 300,
    first: Annotated[int, typer.Option(help="Number of the first; every one is another.")] = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="Machines with other work: noise, slow spells, growth.")
    ] = False,
    out: Out = None,
) -> None:
    """Let the default decode simulated texts, drafters and machines, beside fixed plans."""
    check_int("scenarios", scenarios, 1)
    check_int("first", first, 0)
    from mlx_redrafter.bench.regret import simulate_regret
    from mlx_redrafter.bench.result_file import new_result, write_result

    with progress("Scenarios") as on_progress:
        found = simulate_regret(scenarios, first, shared, on_progress)
    table = Table("regret", "", title=f"{scenarios} scenarios, against the best fixed plan")
    for name, value in (("median", found.median), ("95%", found.p95), ("worst", found.worst)):
        table.add_row(name, f"{value:.1%}")
    if found.least_plain is not None:
        table.add_row("least speed where nothing pays", f"{found.least_plain:.3f}")
    show(table)
    if out is not None:
        configuration = {"scenarios": scenarios, "first": first, "shared": shared}
        write_result(out, new_result("simulate", configuration, found=found))

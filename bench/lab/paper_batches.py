"""The batch tables of the papers of ReDrafter and SpecFormer, on one target.

    python -m mlx_redrafter.bench.lab paper_batches HEADS.json OUT --minutes 25

HEADS.json has "target" (a folder beside the file), "prompts" (a file beside it), "recurrent" (a
folder of a recurrent drafter) and "drafters", folders by name. A drafter that is not there is left
out. OUT receives batches.json, batches.md and batches.png; a cell that batches.json holds is not
measured again, so a second run goes on where the first one has ended. Needs a quiet machine.

A cell is a batch of B texts, none of which ends: some steps that are not timed, then timed ones.

- ReDrafter: tokens/s of all texts and of each, by beam width W and B, with shared prefixes merged
  and with as many nodes as unmerged beams have; the share of nodes that merging saves by W and L.
- SpecFormer: speed relative to plain batches and kappa, accepted drafts by drafts verified
  (a l_d / k in the paper), for every drafter with k drafts of each text.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter import load
from mlx_redrafter.bench.plots import PlotError, figure
from mlx_redrafter.bench.prompts import read_prompts
from mlx_redrafter.checkpoint_files import write_text
from mlx_redrafter.decoding.protocols import Proposer, Step
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Beam widths of ReDrafter's table.
WIDTHS = (1, 2, 4, 8, 16)

# Beam length of that table, root included.
LENGTH = 5

# Batch sizes of that table.
BATCHES = (1, 2, 4, 8)

# Beam widths of the table of saved nodes.
SAVED_WIDTHS = (2, 4, 8, 16, 32)

# Number of texts of the table of saved nodes.
COUNTED = 8

# Beam lengths of the table of saved nodes, root included.
SAVED_LENGTHS = (3, 5, 7, 9)

# Batch sizes of SpecFormer's table.
LARGE_BATCHES = (1, 2, 4, 8, 16, 32, 64)

# Drafts of each text in SpecFormer's table.
BUDGETS = (3, 4, 5)

# Steps before the timed ones.
WARM_UP = 4

# Steps of all texts of a cell at least, so that small batches take more steps.
TEXT_STEPS = 64

# Name of the batches without drafts.
PLAIN = "plain"


@dataclass(frozen=True)
class Cell:
    """A batch to measure.

    Attributes:
        drafter: Name of the drafter, or `PLAIN`.
        batch_size: Number of texts, B.
        width: Beam width, W.
        length: Beam length with the root, L.
        num_nodes: Number of nodes to verify; None for merged beams.
        is_merged: Whether beams are merged; otherwise the pass has as many rows as they have nodes.
    """

    drafter: str
    batch_size: int
    width: int = 1
    length: int = 1
    num_nodes: int | None = None
    is_merged: bool = True

    @property
    def name(self) -> str:
        return " ".join(map(str, asdict(self).values()))


class CellPolicy:
    """The same plan in every step, with padding if the beams count as unmerged."""

    reads_drafts = False

    def __init__(self, plan: DraftPlan, is_merged: bool):
        self.plan = plan
        self.is_merged = is_merged

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        return self.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return tree if self.is_merged else tree.padded(max(tree.size, tree.num_unmerged))

    def observe(self, step: Step) -> None:
        """Do nothing."""


def plan_of(cell: Cell, proposer: Proposer) -> DraftPlan:
    """Make the plan of a cell, as long as the drafter's beams can be."""
    if cell.num_nodes is None:
        shape = DraftShape(cell.width, cell.length, "beam")
        return DraftPlan(shape, shape.max_nodes).within(proposer.max_length)
    plan = DraftPlan.of(cell.width, cell.length, cell.num_nodes)
    return plan.within(proposer.max_length)


def measure(
    cell: Cell, target: Target, proposer: Proposer | None, prompts: list[list[int]], steps: int
) -> dict[str, float]:
    """Decode a batch greedily; return speeds, and means of the timed steps."""
    scheduler, texts = Scheduler(target), []
    for number in range(cell.batch_size):
        prompt = prompts[number % len(prompts)]
        sampler = KeyedSampler(SamplingParams(), target.vocab_size)
        drafts: tuple[Any, ...] = ()
        if proposer is not None:
            policy = CellPolicy(plan_of(cell, proposer), cell.is_merged)
            drafts = proposer.open(target, prompt, True, []), policy
        cache = target.new_cache()
        texts.append(SequenceDecoder(target, cache, sampler, Request(prompt), *drafts))
    scheduler.begin(texts)
    while min(text.stats.steps for text in texts) < WARM_UP:
        _step(scheduler)
    start, before = time.perf_counter(), _counts(texts)
    for _ in range(steps):
        _step(scheduler)
    seconds, after = time.perf_counter() - start, _counts(texts)
    for text in texts:
        scheduler.leave(text)
        text.close()
    tokens, passes, verified, unmerged, accepted = (
        now - then for now, then in zip(after, before, strict=True)
    )
    drafted = max(1, verified - passes)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": 1 + accepted / passes,
        "kappa": accepted / drafted if proposer is not None else 0.0,
        "saved": 1 - verified / unmerged,
        "milliseconds": 1e3 * seconds / steps,
    }


def _step(scheduler: Scheduler) -> None:
    for text, tokens, error in scheduler.step_all():
        if error is not None:
            raise error
        list(text.delivery.deliver(tokens))


def _counts(texts: Sequence[SequenceDecoder]) -> list[int]:
    """Count tokens, steps, nodes verified and unmerged, and accepted drafts of all texts."""
    stats = [text.stats for text in texts]
    accepted = (sum(n * a for a, n in enumerate(one.accepted_counts)) for one in stats)
    return [
        sum(one.num_tokens for one in stats),
        sum(one.steps for one in stats),
        sum(one.num_verified for one in stats),
        sum(one.num_unmerged for one in stats),
        sum(accepted),
    ]


def cells(names: Sequence[str], most: int) -> Iterator[Cell]:
    """Yield all cells of at most ``most`` texts, the shorter ones first."""
    for size in (size for size in LARGE_BATCHES if size <= most):
        yield Cell(PLAIN, size)
        for name in names:
            for budget in BUDGETS:
                yield Cell(name, size, 2, 1 + budget, 1 + budget)
        for width in WIDTHS if size in BATCHES else ():
            for is_merged in (True, False) if width > 1 else (True,):
                yield Cell("recurrent", size, width, LENGTH, None, is_merged)


def counted_cells() -> Iterator[Cell]:
    """Yield the cells of the table of saved nodes, which need no quiet machine."""
    for width in SAVED_WIDTHS:
        for length in SAVED_LENGTHS:
            yield Cell("recurrent", COUNTED, width, length)


def run(heads: Path, out: Path, minutes: float, steps: int, most: int) -> None:
    """Measure the cells that are missing, until the time is spent; write the tables.

    Without a largest batch, count saved nodes only.
    """
    deadline = time.perf_counter() + 60 * minutes
    given = json.loads(heads.read_text())
    folders = {"recurrent": given["recurrent"], **given["drafters"]}
    folders = {name: heads.parent / folder for name, folder in folders.items()}
    missing = [name for name, folder in folders.items() if not folder.exists()]
    names = [name for name in folders if name not in missing]
    sys.stdout.write("".join(f"{name}: not there, left out\n" for name in missing))
    model, tokenizer, _ = load(str(heads.parent / given["target"]), drafter=None)
    target, proposers = Target(model), dict[str, Any]({PLAIN: None})
    for name in names:
        _, _, proposers[name] = load(str(heads.parent / given["target"]), str(folders[name]))
        proposers[name].check_fit(target, tokenizer)
    prompts = [tokenizer.encode(one.text) for one in read_prompts(heads.parent / given["prompts"])]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "batches.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for cell in (*cells(names, most), *counted_cells()):
        if cell.name in found or cell.drafter not in proposers:
            continue
        if time.perf_counter() > deadline:
            sys.stdout.write("the time is spent; run the command again to go on\n")
            break
        count = max(steps, TEXT_STEPS // cell.batch_size)
        found[cell.name] = measure(cell, target, proposers[cell.drafter], prompts, count)
        write_text(path, json.dumps(found, indent=1))
        sys.stdout.write(f"{cell.name}: {found[cell.name]['tokens_per_second']:.1f} tokens/s\n")
        sys.stdout.flush()
    (out / "batches.md").write_text("\n".join(tables(found, names)))
    try:
        plot(out / "batches.png", found, names)
    except PlotError as error:
        sys.stdout.write(f"{error}\n")


Found = Mapping[str, Mapping[str, float]]


def tables(found: Found, names: Sequence[str]) -> list[str]:
    """Write the tables of all cells that are measured."""
    lines = ["## Speed and kappa of every drafter", "", "Times plain batches, and kappa.", ""]
    lines += _heading(["drafter", "drafts"], LARGE_BATCHES)
    for name in names:
        for budget in BUDGETS:
            row = [(size, Cell(name, size, 2, 1 + budget, 1 + budget)) for size in LARGE_BATCHES]
            values = [_speed(found, cell, Cell(PLAIN, size)) for size, cell in row]
            lines.append(_row([name, str(budget), *values]))
    lines += ["", "## ReDrafter", "", "Tokens/s of all texts, and of each.", ""]
    lines += _heading(["beam width", "prefixes"], BATCHES)
    for width in WIDTHS:
        for is_merged in (True, False) if width > 1 else (True,):
            kind = "merged" if is_merged else "not merged"
            row = [(n, Cell("recurrent", n, width, LENGTH, None, is_merged)) for n in BATCHES]
            values = [_tokens(found, cell, size) for size, cell in row]
            lines.append(_row([str(width), kind, *values]))
    plain = [_tokens(found, Cell(PLAIN, size), size) for size in BATCHES]
    lines += [_row(["plain", "", *plain]), "", "## Nodes that merging saves", ""]
    lines += _heading(["beam width"], SAVED_LENGTHS, "L = ")
    for width in SAVED_WIDTHS:
        known = [found.get(Cell("recurrent", COUNTED, width, n).name) for n in SAVED_LENGTHS]
        shares = ["" if one is None else f"{one['saved']:.0%}" for one in known]
        lines.append(_row([str(width), *shares]))
    return [*lines, ""]


def _speed(found: Found, cell: Cell, plain: Cell) -> str:
    if cell.name not in found or plain.name not in found:
        return ""
    speed, kappa = (found[cell.name][key] for key in ("tokens_per_second", "kappa"))
    return f"{speed / found[plain.name]['tokens_per_second']:.2f}, {kappa:.2f}"


def _tokens(found: Found, cell: Cell, batch_size: int) -> str:
    if cell.name not in found:
        return ""
    speed = found[cell.name]["tokens_per_second"]
    return f"{speed:.1f}, {speed / batch_size:.1f}"


def _heading(names: Sequence[str], columns: Sequence[int], unit: str = "B = ") -> list[str]:
    titles = [*names, *(f"{unit}{column}" for column in columns)]
    return [_row(titles), _row(["---"] * len(titles))]


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def plot(path: Path, found: Found, names: Sequence[str]) -> None:
    """Draw the best speed of each drafter, relative to plain batches, by batch size."""
    with figure(path, "Batches with drafts, greedy decoding") as axes:
        for name in names:
            points: dict[int, float] = {}
            for size in LARGE_BATCHES:
                plain = found.get(Cell(PLAIN, size).name)
                for budget in BUDGETS:
                    one = found.get(Cell(name, size, 2, 1 + budget, 1 + budget).name)
                    if one is not None and plain is not None:
                        speed = one["tokens_per_second"] / plain["tokens_per_second"]
                        points[size] = max(speed, points.get(size, 0.0))
            if points:
                axes.plot(list(points), list(points.values()), marker="o", label=name)
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("texts in the batch, B")
        axes.set_ylabel("times as fast as plain batches")
        axes.legend()

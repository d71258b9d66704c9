"""Worst-case regression: speed against stock mlx-lm on bad drafts, in pairs of whole answers.

Every step has a plan of its own, so an answer whose drafts do not pay should take as long as
stock's. Its time includes the probes that find this out; it excludes timing the plans once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_redrafter.bench.lab.arms import run, take_turn, warm_up
from mlx_redrafter.bench.lab.cases import GuardCase
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    Arm,
    CommonSettings,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate
from mlx_redrafter.bench.turns import reference_arm, time_shapes
from mlx_redrafter.engine.stored_costs import CONTEXT

# Minimum median of mlx-lm's time relative to the default's.
MIN_RATIO = 0.97
# Minimum length of an answer, in tokens; in shorter ones single tokens weigh too much.
MIN_TOKENS = 32
# Maximum number of prompts per pair, as some have short answers.
DRAWS = 4


@dataclass(frozen=True)
class GuardResult:
    """Results of a case. Ratios are stock mlx-lm's time over ours: above 1, drafting is faster.

    Attributes:
        case: Name of the case.
        decode: Ratio from the first token to the last; None without a pair.
        total: Ratio from the prompt to the last token.
        worst: Smallest ratio of a pair from the first token to the last.
        tokens_per_step: Tokens per step with drafts.
        plain_share: Share of plain steps among them.
        num_pairs: Number of pairs measured.
        num_missing: Number of pairs missing because too many answers were short.
        num_short: Number of pairs left out because an answer was short.
        num_different: Number of drafted texts, of all pairs, that are not the target's own.
    """

    case: str
    decode: MedianEstimate | None
    total: MedianEstimate | None
    worst: float | None
    tokens_per_step: float | None
    plain_share: float | None
    num_pairs: int
    num_missing: int
    num_short: int
    num_different: int

    @property
    def holds(self) -> bool:
        """Whether the case was measured, is not slower, and all texts are right."""
        is_fast = self.decode is not None and self.decode.median >= MIN_RATIO
        return is_fast and self.num_missing == 0 and self.num_different == 0


def guard(
    setting: CommonSettings,
    cases: Sequence[GuardCase],
    num_pairs: int,
    recording: Recording,
    on_progress: OnProgress = lambda done, total: None,
) -> list[GuardResult]:
    """Measure every case.

    Args:
        setting: Settings of all answers, except that each case has its own drafter.
        cases: The cases.
        num_pairs: Number of pairs to measure for each case.
        recording: Record of the runs; turns that it has are not repeated.
        on_progress: Callback for the number of pairs done and their total.
    """
    if "calibration_seconds" not in recording.result:
        time_shapes(setting, CONTEXT, recording)
    total = len(cases) * num_pairs
    verdicts = []
    for i, case in enumerate(cases):
        on_progress(i * num_pairs, total)
        own = replace(setting, drafter=case.drafter)

        def on_pair(done: int, before: int = i * num_pairs) -> None:
            on_progress(before + done, total)

        _measure(own, case, num_pairs, recording, on_pair)
        runs = [one for one in recording.runs if one.group == case.name]
        verdicts.append(judge(case.name, runs, setting, num_pairs))
    on_progress(total, total)
    recording.finish(found=verdicts)
    return verdicts


def judge(
    case: str, runs: Sequence[TimedRun], setting: CommonSettings, num_pairs: int
) -> GuardResult:
    """Summarise a case.

    Args:
        case: Name of the case.
        runs: All runs of the case.
        setting: Settings, of which the length of answers and the temperature are used.
        num_pairs: Number of pairs to measure.
    """
    reference = reference_arm(setting)
    turns: dict[tuple[str, int, str, int], list[TimedRun]] = {}
    for one in runs:
        turns.setdefault(one.turn, []).append(one)
    counted = [turn for turn in turns.values() if _is_long(turn, setting)]
    pairs = [(_find(turn, STOCK), _find(turn, AUTO)) for turn in counted]
    drafted = [auto for _, auto in pairs]
    decodes = [stock.seconds_per_token / auto.seconds_per_token for stock, auto in pairs]
    totals = [_total(stock) / _total(auto) for stock, auto in pairs]
    steps = sum(one.steps for one in drafted)
    tokens = sum(len(one.tokens) - 1 for one in drafted)
    (all_texts,) = (row for row in summarise(runs, reference) if row.arm == AUTO)
    return GuardResult(
        case=case,
        decode=estimate(decodes) if decodes else None,
        total=estimate(totals) if totals else None,
        worst=min(decodes, default=None),
        tokens_per_step=tokens / steps if steps else None,
        plain_share=sum(one.num_plain for one in drafted) / steps if steps else None,
        num_pairs=len(pairs),
        num_missing=max(0, num_pairs - len(pairs)),
        num_short=len(turns) - len(pairs),
        num_different=all_texts.num_different or 0,
    )


def _measure(
    setting: CommonSettings,
    case: GuardCase,
    num_pairs: int,
    recording: Recording,
    on_pair: Callable[[int], None],
) -> None:
    """Add pairs until there are enough with long answers, or too many prompts have been tried."""
    arms: dict[str, Arm] = {STOCK: stock_arm(setting), AUTO: drafted_arm(setting, None)}
    is_warm, num_long = False, 0
    for number in range(DRAWS * num_pairs):
        turn = Turn(case.name, 0, case.prompt(number), number)
        if not recording.has(turn.key):
            if not is_warm:
                warm_up(arms, turn.prompt)
                is_warm = True
            runs = take_turn(arms, turn)
            if setting.temp > 0:  # only for its text: stock's noise is another one
                runs.append(run(PLAIN, plain_arm(setting), turn))
            recording.add(runs)
        num_long += _is_long([one for one in recording.runs if one.turn == turn.key], setting)
        on_pair(num_long)
        if num_long == num_pairs:
            return


def _is_long(turn: Sequence[TimedRun], setting: CommonSettings) -> bool:
    return min(len(one.tokens) for one in turn) >= min(MIN_TOKENS, setting.max_tokens)


def _find(turn: Sequence[TimedRun], arm: str) -> TimedRun:
    (found,) = (one for one in turn if one.arm == arm)
    return found


def _total(one: TimedRun) -> float:
    """Seconds per token of a whole answer, its prompt included."""
    return (one.prompt_seconds + one.decode_seconds) / len(one.tokens)

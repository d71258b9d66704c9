"""Options that several commands of the laboratory share, and how they are read."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.prompts import (
    describe_prompts,
    encode_prompts,
    read_prompts,
    select_prompts,
)
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.result_file import pair_names
from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt
from mlx_redrafter.cli.bench_output import parse_shapes
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.redrafter.network import Drafter

PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, and the old man who lived by the sea said to his daughter:"
)


def at_least(low: int) -> Callable[[str], int]:
    """Return a parser of integers from ``low`` up."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}")
        return number

    return parse


def parse_seconds(text: str) -> float:
    """Parse a duration of 0 seconds or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ArgumentTypeError(f"expected 0 seconds or more, got {text!r}")
    return seconds


def parse_shares(text: str) -> tuple[float, ...]:
    """Parse shares such as 0.6,0.8,1, each from 0 to 1."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected shares such as 0.6,0.8,1, got {text!r}") from None
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"expected shares from 0 to 1, got {text!r}")
    return shares


def add_pair(parser: ArgumentParser) -> None:
    """Add the options of a target and its drafter."""
    parser.add_argument("--model", help="folder or repository of the target; default: bundled")
    parser.add_argument("--drafter", help="folder or repository of the drafter, lookup or mtp")


def load_pair(arguments: Namespace) -> tuple[Any, Any, Any]:
    """Load the target, its tokenizer and the drafter."""
    return Pair(arguments.model, arguments.drafter).load()


def load_recurrent_pair(arguments: Namespace) -> tuple[Any, Any, Drafter]:
    """Load the target, its tokenizer and a recurrent drafter.

    Raises:
        ConfigError: No drafter is given for the model, or the drafter is of another kind.
    """
    if arguments.model is not None and arguments.drafter is None:
        raise ConfigError("expected a drafter for the model, got none; add --drafter FOLDER")
    model, tokenizer, drafter = load_pair(arguments)
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"expected a recurrent drafter, got {drafter!r}; name another folder")
    return model, tokenizer, drafter


def describe_pair(arguments: Namespace, drafter: Any) -> dict[str, Any]:
    """Describe the pair for a result; ``drafter`` is the loaded one."""
    pair = Pair(arguments.model, arguments.drafter)
    return pair_names(pair.model, pair.drafter_name, drafter)


def add_prompts(parser: ArgumentParser) -> None:
    """Add the options of a file of prompts."""
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl or text file")
    parser.add_argument("--num-prompts", type=at_least(1), help="from all categories alternately")
    parser.add_argument("--ignore-chat-template", action="store_true")


def read_given_prompts(arguments: Namespace, tokenizer: Any) -> list[EncodedPrompt]:
    """Read and encode the prompts.

    Raises:
        ConfigError: The file has no prompts, or the chat template rejects one.
    """
    chosen = select_prompts(read_prompts(arguments.prompts), arguments.num_prompts)
    return encode_prompts(tokenizer, chosen, not arguments.ignore_chat_template)


def add_rounds(parser: ArgumentParser, max_tokens: int = 64, repeats: int = 2) -> None:
    """Add the options of texts that several methods generate in interleaved runs."""
    parser.add_argument("-m", "--max-tokens", type=at_least(2), default=max_tokens)
    parser.add_argument("--repeats", type=at_least(1), default=repeats, help="rounds per prompt")
    parser.add_argument("--cool-down", type=parse_seconds, default=0.0, help="seconds before a run")
    parser.add_argument(
        "--max-repeated",
        type=float,
        default=1.0,
        help="maximum share of repeated 4-grams; texts with more do not count",
    )


def describe_rounds(arguments: Namespace) -> dict[str, Any]:
    """Describe the rounds for a result."""
    names = ("max_tokens", "repeats", "cool_down")
    return {name: getattr(arguments, name) for name in names}


def begin_recording(
    kind: str, arguments: Namespace, drafter: Any, encoded: Sequence[EncodedPrompt], **others: Any
) -> Recording:
    """Begin or resume the recording of a benchmark of one pair; ``others`` describe it further.

    Raises:
        ConfigError: The file exists, or was measured with other settings.
        OSError: Its folder takes no file.
    """
    configuration = {
        **describe_pair(arguments, drafter),
        **describe_prompts(arguments.prompts, encoded),
        **describe_rounds(arguments),
        **others,
    }
    return Recording(arguments.out, kind, configuration, arguments.resume)


def add_sampling(parser: ArgumentParser) -> None:
    """Add temperature and seed."""
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def make_settings(
    arguments: Namespace, model: Any, tokenizer: Any, drafter: Any, **others: Any
) -> CommonSettings:
    """Make the settings of a benchmark from its options.

    Raises:
        ConfigError: Temperature or seed is out of range.
    """
    sampling = {name: value for name, value in vars(arguments).items() if name in ("temp", "seed")}
    SamplingParams(**sampling)
    return CommonSettings(model, tokenizer, drafter, arguments.max_tokens, **sampling, **others)


def add_shape(parser: ArgumentParser, default: str | None = "4x5x9") -> None:
    """Add the draft shape of every step."""
    parser.add_argument("--shape", default=default, help="WIDTHxLENGTHxNODES; default: %(default)s")


def read_plan(arguments: Namespace) -> DraftPlan:
    """Read the plan of every step.

    Raises:
        ConfigError: The shape cannot be read, a size is out of range, or there are several shapes.
    """
    plans = parse_shapes(arguments.shape)
    if len(plans) != 1:
        raise ConfigError(f"expected one draft shape, got {arguments.shape!r}")
    return plans[0]


def add_out(parser: ArgumentParser, what: str = "JSON file", can_resume: bool = False) -> None:
    """Add the option of the result's path, and for long benchmarks of going on with it."""
    parser.add_argument("-o", "--out", type=Path, help=f"{what} for the result")
    if can_resume:
        parser.add_argument("--resume", action="store_true", help="continue an interrupted run")

"""Options of training a drafter.

The description of a field is also the help text of its option on the command line, which has the
field's name. Fields without a description are for Python only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from mlx_redrafter.checks import check_choice, check_int, check_number
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import ConfigError

Recipe = Literal["soft", "coupled", "overlap", "apple"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
Head = Literal[
    "redrafter", "medusa", "eagle", "eagle1", "mtp", "specformer", "dflash", "dflash2", "dspark"
]
# Kinds of heads, with the options that each kind has as well as the length.
HEADS: Mapping[Head, tuple[str, ...]] = {
    "redrafter": ("exit_dim", "layers", "draft_vocab"),
    "medusa": ("layers", "draft_vocab"),
    "eagle": ("draft_vocab",),
    "eagle1": (),
    "mtp": (),
    "specformer": (),
    "dflash": ("layers",),
    "dflash2": ("layers",),
    "dspark": ("layers",),
}
# Bounds of the options that some heads have.
SHAPE: Mapping[str, tuple[int, int | None]] = {
    "exit_dim": (1, None),
    "layers": (0, 16),
    "draft_vocab": (1, None),
}
# Heads that training can continue from an earlier drafter: recurrent and block drafters.
CONTINUED: tuple[Head, ...] = ("redrafter", "dflash", "dflash2", "dspark")


@dataclass(frozen=True)
class DataOptions:
    """Options of the texts to train on.

    Texts are cut to ``sequence_length`` tokens. ``held_out`` self-generated texts only measure
    tokens per step: half of them to choose the weights, half for the card.
    """

    tokens: Annotated[
        int | None,
        "Number of tokens to train on, or somewhat more; by default those of all texts, or "
        "1000000 if the model writes them.",
    ] = None
    sequence_length: int = 512
    self_generated: Annotated[
        float, "Share of the tokens that the model generates for training, 0 to 1."
    ] = 0.5
    answer_tokens: Annotated[int, "Maximum number of tokens of a self-generated text."] = 256
    temp: Annotated[
        float, "Sampling temperature of half of the self-generated texts; the others are greedy."
    ] = 0.8
    held_out: int = 32
    seed: Annotated[int, "Random seed of texts, initial weights and order."] = 0

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_int("tokens", self.tokens, 1)
        check_int("sequence_length", self.sequence_length, 16)
        check_int("answer_tokens", self.answer_tokens, 8)
        check_int("held_out", self.held_out, 1)
        check_int("seed", self.seed, 0, 2**31 - 1)
        check_number("self_generated", self.self_generated, 0, 1)
        check_number("temp", self.temp, 0, 100)


@dataclass(frozen=True)
class NetworkOptions:
    """Shape of the drafter, or an earlier drafter; the defaults suit small and large targets.

    ``layers`` is the number of residual blocks before the head, by default 2, of Medusa heads 1; of
    a block drafter the number of decoder layers.
    """

    head: Annotated[
        Head,
        "Kind of drafter: redrafter is recurrent, eagle EAGLE-3, mtp an MTP module in MiMo's "
        "format.",
    ] = "redrafter"
    start_from: Annotated[
        str | None,
        "Recurrent or block drafter to continue training, made for this or a similar model: a "
        "folder or a hub repository. The new drafter has its shape.",
    ] = None
    exit_dim: Annotated[
        int | None,
        "Width of a recurrent drafter's head; a wider one costs more time and memory. By default "
        "1024, or twice the hidden size if that is less.",
    ] = None
    layers: int | None = None
    length: Annotated[int, "Number of tokens per beam to train for, root included."] = 5
    draft_vocab: Annotated[
        int | None,
        "Number of tokens that the drafter can propose, the special and the most frequent ones of "
        "the texts; fewer train and draft faster. By default an eighth of the model's, at least "
        "8192; all if they are fewer than 16384.",
    ] = None

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        given = [name for name in SHAPE if getattr(self, name) is not None]
        for name in given:
            if name not in HEADS[self.head]:
                raise ConfigError(f"{name} has no meaning for the head {self.head}; leave it out")
            check_int(name, getattr(self, name), *SHAPE[name])
        check_int("length", self.length, 2, MAX_BEAM_LENGTH, " (the root counts as one)")
        if self.start_from is None:
            return
        if self.head not in CONTINUED:
            raise ConfigError(
                "training can start from a recurrent or block drafter only, got the head "
                f"{self.head}; leave --start-from out"
            )
        if given:
            named = " and ".join(given)
            raise ConfigError(f"the drafter {self.start_from} keeps its shape; leave {named} out")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the optimisation.

    The learning rate rises linearly to its peak, then falls as a cosine to a hundredth of it.

    Attributes:
        recipe: Training objective; `draft_loss` has their equations.
        batch_tokens: Positions per optimiser step.
        num_evaluations: Number of measurements of tokens per step over the whole run; fewer in
            short runs.
        patience: Number of measurements without improvement, in the second half of the run, that
            stops training.
        checkpoint_seconds: Maximum time between checkpoints, in seconds; 0 writes one after every
            step.
    """

    recipe: Annotated[
        Recipe,
        "Objective: the model's distributions (soft), the same for sampled text (coupled), "
        "DSpark's (overlap), or the tokens of the texts (apple).",
    ] = "soft"
    epochs: Annotated[int, "Number of passes over the texts."] = 3
    minutes: Annotated[
        float | None,
        "Approximate time of the whole run, including generation and evaluation, instead of "
        "--epochs.",
    ] = None
    batch_tokens: int = 1024
    lr: Annotated[
        float | None, "Peak learning rate; by default inverse to the width of the drafter."
    ] = None
    num_evaluations: int = 20
    patience: int = 5
    checkpoint_seconds: float = 60.0
    seed: Annotated[int, "Random seed of texts, initial weights and order."] = 0

    def __post_init__(self) -> None:
        check_choice("recipe", self.recipe, RECIPES)
        check_int("epochs", self.epochs, 1)
        check_int("batch_tokens", self.batch_tokens, 1)
        check_int("num_evaluations", self.num_evaluations, 1)
        check_int("patience", self.patience, 1)
        check_int("seed", self.seed, 0, 2**31 - 1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0, 1e6)
        if self.lr is not None:
            check_number("lr", self.lr, 1e-9, 10)
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0, math.inf)

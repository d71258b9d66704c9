"""Validated options of one request: sampling, KV cache quantization, lengths and drafts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypedDict

from mlx_redrafter.checks import (
    check_choice,
    check_instance,
    check_int,
    check_max_tokens,
    check_number,
)
from mlx_redrafter.draft_plan import DraftPlan, Selection

Auto = Literal["auto"]

# Bits per element to which MLX can quantise.
KV_BITS = (1, 2, 3, 4, 5, 6, 8)
# Elements per group with which MLX can quantise.
KV_GROUP_SIZES = (32, 64, 128)
# Number of tokens from which on mlx-lm quantises by default.
QUANTIZED_KV_START = 5000

# Maximum temperature. At this value sampling is uniform, and MLX rejects integers over 2**63.
MAX_TEMP = 1e6


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of the target, with mlx-lm's meaning.

    Attributes:
        temp: Temperature; 0 selects the most probable token.
        top_p: Probability mass from which to sample; 0 and 1 turn it off.
        top_k: Number of most probable tokens from which to sample; 0 turns it off.
        min_p: Minimum probability, relative to the most probable token; 0 turns it off.
        seed: Seed of the random numbers, 0 to 2**32 - 1.
    """

    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temp", self.temp, 0, MAX_TEMP)
        check_number("top_p", self.top_p, 0, 1, " (0: off)")
        check_number("min_p", self.min_p, 0, 1, " (0: off)")
        check_int("top_k", self.top_k, 0, hint=" (0: off)")
        check_int("seed", self.seed, 0, 2**32 - 1)


# Names of the sampling options in every interface of this package.
SAMPLING_NAMES = tuple(one.name for one in fields(SamplingParams))


@dataclass(frozen=True)
class Quantisation:
    """Options of KV cache quantization, with mlx-lm's meaning.

    ``start`` is the number of tokens from which on the whole cache is quantised.
    """

    bits: int
    group_size: int = 64
    start: int = QUANTIZED_KV_START

    def __post_init__(self) -> None:
        check_choice("kv_bits", self.bits, KV_BITS)
        check_choice("kv_group_size", self.group_size, KV_GROUP_SIZES)
        check_int("quantized_kv_start", self.start, 0)

    def of_text(self, length: int) -> Quantisation | None:
        """Return the options for a sequence of ``length`` tokens, or None if it is too short."""
        return replace(self, start=0) if length >= self.start else None


@dataclass(frozen=True)
class GenerationOptions:
    """The options of one text that are numbers and words, for Python, the CLI and the server.

    The description of a field is also the help text of its option on the command line.

    The text depends on the prompt, the sampling options and the seed, but not on the draft options.
    With ``select="top_n"`` and "auto" for ``beam_width``, ``beam_length`` and ``tree_nodes``, the
    policy chooses a plan for every step. If one of the three is a number, the default of the others
    is 4, 5 and 9. Without a seed, every text has new random numbers. Without ``couple``, fewer
    drafts are accepted at temperatures above 0; the option exists to measure how many.
    """

    max_tokens: Annotated[
        int, "Maximum number of tokens to generate; -1 for no limit but the model's context."
    ] = 256
    temp: Annotated[float | None, "Temperature; 0 is greedy decoding."] = None
    top_p: Annotated[float | None, "Sample from this probability mass only; 0 turns it off."] = None
    top_k: Annotated[
        int | None, "Sample from this many most probable tokens only; 0 turns it off."
    ] = None
    min_p: Annotated[
        float | None, "Minimum probability, relative to the most probable token; 0 turns it off."
    ] = None
    seed: Annotated[int | None, "Seed of the random numbers, 0 to 2**32 - 1."] = None
    beam_width: Annotated[int | Auto, "Number of beams of the draft search, 1 to 64."] = "auto"
    beam_length: Annotated[
        int | Auto, "Tokens per beam, the newest token of the text included, 2 to 16."
    ] = "auto"
    tree_nodes: Annotated[
        int | Auto, "Tokens per forward pass: the newest one of the text, and the drafts to check."
    ] = "auto"
    select: Annotated[
        Selection, "top_n: the most probable drafts; beam: the paper's merged beams."
    ] = "top_n"
    couple: Annotated[
        bool, "Rank drafts with the target's random numbers, at temperatures above 0."
    ] = True
    prefill_step_size: Annotated[
        int, "Maximum number of prompt tokens per forward pass; fewer need less memory."
    ] = 2048
    kv_bits: Annotated[
        int | None, "Quantise the KV cache to this many bits: 1 to 6 or 8; off by default."
    ] = None
    kv_group_size: Annotated[
        int, "Elements per group of the quantised KV cache: 32, 64 or 128."
    ] = Quantisation.group_size
    quantized_kv_start: Annotated[
        int, "Number of tokens from which on the KV cache is quantised."
    ] = Quantisation.start

    def __post_init__(self) -> None:
        _ = self.plan, self.sampling(0), self.quantisation  # each of them checks its options
        check_max_tokens(self.max_tokens)
        check_int("prefill_step_size", self.prefill_step_size, 1)
        check_instance("couple", self.couple, bool, "True or False")

    @property
    def plan(self) -> DraftPlan | None:
        """Fixed plan of all steps; None if every step may have its own."""
        sizes = {"width": self.beam_width, "length": self.beam_length, "num_nodes": self.tree_nodes}
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size != "auto"}
        if not given and self.select == "top_n":
            return None
        return DraftPlan.of(**given, select=self.select)

    @property
    def given_sampling(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SAMPLING_NAMES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def quantisation(self) -> Quantisation | None:
        bits = KV_BITS[-1] if self.kv_bits is None else self.kv_bits  # to check the other options
        found = Quantisation(bits, self.kv_group_size, self.quantized_kv_start)
        return None if self.kv_bits is None else found

    def sampling(self, fresh_seed: int) -> SamplingParams:
        """Return the sampling options, with ``fresh_seed`` if no seed is given."""
        return SamplingParams(**{"seed": fresh_seed, **self.given_sampling})


class OptionKeywords(TypedDict, total=False):
    """The fields of `GenerationOptions` as keyword arguments, for type checkers."""

    max_tokens: int
    temp: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    beam_width: int | Auto
    beam_length: int | Auto
    tree_nodes: int | Auto
    select: Selection
    couple: bool
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int

"""Options of ``redrafter-mlx convert``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlx_redrafter.convert.conversion_options import Quantization, VocabularySlice

Source = Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub repository.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")]


class Dtype(StrEnum):
    """Dtype of the weights."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Layout(StrEnum):
    """Layout of the files to write."""

    MLX = "mlx"
    PYTORCH = "pytorch"


class Recurrence(StrEnum):
    """Function after the linear maps of the RNN."""

    SILU = "silu"
    IDENTITY = "identity"


class TreeKind(StrEnum):
    """Kind of the trees of Medusa heads."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True)
class QuantizationOptions:
    """Quantisation of the result."""

    quantize: Annotated[bool, typer.Option("-q", "--quantize", help="Quantise.")] = False
    q_bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3, 4, 6 or 8.")] = 4
    q_group_size: Annotated[int, typer.Option(help="Weights per group: 32, 64 or 128.")] = 64

    def read(self) -> Quantization | None:
        """The quantisation, None if there is none."""
        from mlx_redrafter.convert.conversion_options import Quantization

        return Quantization(self.q_bits, self.q_group_size) if self.quantize else None


@dataclass(frozen=True)
class VocabularyOptions:
    """The target, and the tokens that the drafter can propose."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model that the drafter is for: check that it fits, test it."
        ),
    ] = None
    vocab_slice: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draft only the N most frequent tokens of --vocab-text (recurrent, Medusa).",
        ),
    ] = None
    vocab_text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text like that to be generated; may be repeated."),
    ] = None

    def __post_init__(self) -> None:
        if (self.vocab_slice is None) != (not self.vocab_text):
            raise typer.BadParameter("--vocab-slice and --vocab-text need each other")
        if self.vocab_slice is not None and self.target is None:
            raise typer.BadParameter(
                "--vocab-slice needs --target, whose tokenizer counts the tokens"
            )

    def read(self) -> VocabularySlice | None:
        """The part of the vocabulary, None for all of it."""
        from mlx_redrafter.convert.conversion_options import VocabularySlice

        if self.vocab_slice is None:
            return None
        return VocabularySlice(self.vocab_slice, tuple(self.vocab_text or ()))

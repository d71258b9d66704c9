"""Options of a conversion, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.convert.stored import DTYPES
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.medusa.config import MedusaConfig, Tree
from mlx_redrafter.proposers.mtp.network import MtpConfig
from mlx_redrafter.proposers.quantization import check_quantization
from mlx_redrafter.proposers.redrafter.config import Activation, DrafterConfig

Config = BlockConfig | DrafterConfig | EagleConfig | MedusaConfig | MtpConfig


@dataclass(frozen=True)
class Quantization:
    """Quantization as in mlx-lm."""

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        check_quantization(self.bits, self.group_size)

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}"


@dataclass(frozen=True)
class VocabularySlice:
    """A reduced vocabulary: the most frequent tokens of some text files."""

    num_rows: int
    texts: tuple[Path, ...]


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        dtype: Dtype of the weights: "float16", "bfloat16" or "float32".
        quantization: Quantization of the weights; None for none.
        target: Folder or repository of the model that the drafter was trained for; None skips the
            self-test.
        rnn_activation: Activation of the recurrence; None to infer it from the checkpoint.
        vocabulary: Reduced vocabulary of the head, which needs ``target``; None for no reduction.
        tree: Kind of tree of Medusa heads; "static" needs ``target``. None for the kind in the
            checkpoint, or else "dynamic".
    """

    dtype: str = "float16"
    quantization: Quantization | None = None
    target: str | Path | None = None
    rnn_activation: Activation | None = None
    vocabulary: VocabularySlice | None = None
    tree: Tree | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.vocabulary is not None and (self.target is None or not self.vocabulary.texts):
            raise ConfigError(
                "a reduced vocabulary needs a target, whose tokenizer counts tokens, and texts; "
                "give --target and --vocab-text"
            )


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    config: Config
    provenance: dict[str, Any]
    warnings: tuple[str, ...]

"""The shape of Medusa heads, as stored in the ``config.json`` next to their weights."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from mlx_redrafter.checks import check_choice, check_int, is_number
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.stored_config import (
    COUPLING_WEIGHT,
    INVERSE_TEMPERATURE,
    MAX_COUNT,
    StoredConfig,
)

MODEL_TYPE = "redrafter_medusa"
# Number of ranks of a head whose accuracies are stored.
MAX_RANKS = 32


@dataclass(frozen=True)
class MedusaConfig(StoredConfig):
    """The shape of Medusa heads, as stored in their ``config.json``.

    Attributes:
        num_heads: Number of heads, K; head k proposes the drafts k + 1 after the root.
        num_layers: Number of residual SiLU blocks of a head before its final linear layer.
        bias: Whether the blocks have biases.
        draft_vocab_size: Rows of the heads if they propose only part of the vocabulary, else None.
        tree: "dynamic" for the drafts with the largest products of the heads' probabilities,
            "static" for those with the largest products of ``rank_accuracies``: the same tree of
            ranks at every step, as in the paper.
        rank_accuracies: Chances that the target's token is the r-th most probable one of head k, a
            tuple for each head; None if nobody has measured them.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    bias: bool = True
    draft_vocab_size: int | None = None
    tree: Literal["dynamic", "static"] = "dynamic"
    rank_accuracies: tuple[tuple[float, ...], ...] | None = None
    inverse_temperature: float = INVERSE_TEMPERATURE
    coupling_weight: float = COUPLING_WEIGHT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("drafter num_heads", self.num_heads, 1, MAX_COUNT)
        check_int("drafter num_layers", self.num_layers, 0, MAX_COUNT)
        check_choice("drafter tree", self.tree, ("dynamic", "static"))
        if self.rank_accuracies is not None:
            self._check_accuracies(self.rank_accuracies)
        elif self.tree == "static":
            raise ConfigError("drafter tree 'static' needs rank_accuracies")

    def _check_accuracies(self, table: Any) -> None:
        num_ranks = min(MAX_RANKS, self.head_rows)
        is_table = isinstance(table, tuple) and len(table) == self.num_heads
        if not is_table or not all(
            isinstance(row, tuple)
            and len(row) == num_ranks
            and all(is_number(one) and 0 < one <= 1 for one in row)
            for row in table
        ):
            raise ConfigError(
                f"drafter rank_accuracies must be {self.num_heads} lists of {num_ranks} numbers "
                "above 0 and at most 1"
            )

    @property
    def static_accuracies(self) -> tuple[tuple[float, ...], ...] | None:
        """``rank_accuracies`` if the tree is static, else None."""
        return self.rank_accuracies if self.tree == "static" else None

    @property
    def summary(self) -> str:
        return (
            f"hidden_size {self.hidden_size}, {self.num_heads} heads of {self.head_rows} tokens "
            f"with {self.num_layers} blocks, {self.tree} tree"
        )

    @property
    def head_names(self) -> list[str]:
        """Tensors with a row for every token that a head proposes."""
        return [f"heads.{k}.{self.num_layers}.weight" for k in range(self.num_heads)]

    def reduced(self, num_rows: int) -> Self:
        """Return the config of the same heads with ``num_rows`` tokens."""
        table = self.rank_accuracies
        kept = None if table is None else tuple(row[:num_rows] for row in table)
        return replace(self, draft_vocab_size=num_rows, rank_accuracies=kept)

"""A kind of proposer that exists in the tests alone: the next token from a table of pairs.

Together with an entry in `proposers.KINDS` this folder is all that a new kind needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.search import Expansion, NoiseRank, log_probs, search_all
from mlx_redrafter.proposers.stored_config import StoredConfig

NAME = "table of pairs"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == ToyConfig.model_type


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> "Toy":
    stored = Checkpoint(path_or_repo)
    config = ToyConfig.from_dict(stored.config)
    target.check(config)
    return stored.fill(Toy(config))


@dataclass(frozen=True)
class ToyConfig(StoredConfig):
    model_type: ClassVar[str] = "toy_pairs"
    draft_vocab_size: ClassVar[None] = None
    vocab_size: int
    hidden_size: int


class Toy(DraftNetwork):
    """Logits of the token after each token, whatever came before."""

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.table = mx.zeros((config.vocab_size, config.vocab_size))

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        roots = mx.concatenate([flight.root for _, flight in group])
        return search_all(ToyLevels(self, roots), shape, rank)


class ToyLevels:
    """The table after some roots."""

    def __init__(self, network: Toy, roots: mx.array):
        self.network = network
        self.roots = roots
        self.to_token_ids = network.to_token_ids

    def first(self) -> mx.array:
        return log_probs(self.network.table[self.roots])

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        return log_probs(self.network.table[tokens])

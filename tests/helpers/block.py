"""Random block drafters."""

from typing import Any

from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from tests.helpers.models import draw_weights

# Fields of the config for each link.
LINKS: dict[str, dict[str, Any]] = {
    "DFlash": {"first_slot": 1, "block_size": 6, "windows_from_root": True},
    "DFlash 2": {"first_slot": 1, "block_size": 6, "link": "selector", "rank": 8,
        "num_candidates": 12, "conv_taps": 3, "conv_groups": 4},
    "vanilla": {"link": "vanilla", "rank": 8},
    "gated": {"link": "gated", "rank": 8, "num_candidates": 20},
    "recurrent": {"link": "recurrent", "rank": 8},
}  # fmt: skip


def block_config(vocab_size: int, hidden_size: int, **changes: Any) -> BlockConfig:
    """Make a small config of two layers, the second one with a short window."""
    values: dict[str, Any] = {
        "hidden_size": hidden_size, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocab_size, "num_hidden_layers": 2,
        "captured_layers": (0, 1), "block_size": 5, "first_slot": 0, "mask_token_id": 1,
        "windows": (None, 9), "causal": (False, True),
    }  # fmt: skip
    return BlockConfig(**{**values, **changes})


def random_block(config: BlockConfig, seed: int = 0) -> BlockNetwork:
    return draw_weights(BlockNetwork(config), seed)

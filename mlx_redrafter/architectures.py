"""Which mlx-lm architectures are decoded exactly, and where their parts are."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.nn as nn

from mlx_redrafter.errors import UnsupportedTargetError


class Parts(NamedTuple):
    """The modules of a model that this package needs.

    Attributes:
        backbone: Its output, after the final norm, enters the LM head.
        embedding: The input embedding, ids to rows.
        ropes: Every rotary embedding.
        hidden_size: H.
        vocab_size: Rows of the embedding.
        context_length: Positions the model was made for, None where the config does not say.
    """

    backbone: nn.Module
    embedding: nn.Module
    ropes: list[nn.Module]
    hidden_size: int
    vocab_size: int
    context_length: int | None


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a supported model.

    Raises:
        UnsupportedTargetError: The architecture is not known to be decoded exactly.
    """
    if getattr(model, "model_type", None) != "llama":
        raise UnsupportedTargetError("only llama for now")
    args: Any = model.args
    ropes = [m for name, m in model.named_modules() if "rope" in name.rsplit(".", 1)[-1]]
    return Parts(
        backbone=model.model,
        embedding=model.model.embed_tokens,
        ropes=ropes,
        hidden_size=args.hidden_size,
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
    )


def check_config(config: Any) -> None:
    """Placeholder until the allow-list lands."""

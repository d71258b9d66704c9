"""Parts of published configs and tensors that drafters of several kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_redrafter.checks import as_mapping

# Name of the offsets from rows of the head to token ids.
OFFSETS = "d2t"
# Largest int32, which is the token id of no model.
LAST_ID = 2**31 - 1


def resolve_offsets(weights: dict[str, mx.array], names: Mapping[str, str]) -> None:
    """Replace offsets from rows of the head to token ids by these ids, int32, shape (V,).

    ``names`` are the published names by those of the network.
    """
    offsets = weights.get("token_ids")
    if offsets is None or not names["token_ids"].endswith(OFFSETS):
        return
    if mx.issubdtype(offsets.dtype, mx.integer):  # `check_token_ids` refuses others
        ids = mx.arange(offsets.shape[0], dtype=mx.int64) + offsets.astype(mx.int64)
        weights["token_ids"] = mx.clip(ids, -1, LAST_ID).astype(mx.int32)


def speculative_tokens(values: Mapping[str, Any]) -> Any:
    """Return the number of drafts of the first method in a config; None if it has none."""
    methods = as_mapping(values.get("speculators_config")).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return as_mapping(first).get("speculative_tokens")

"""Speculative speculative decoding (arXiv 2603.03251), around a recurrent drafter or a draft model.

This folder has all of it. The networks' own folders know nothing of it.
"""

from mlx_redrafter.proposers.speculate_ahead.speculate_ahead import (
    Hits,
    SpeculateAhead,
    likeliest_outcomes,
)

__all__ = ["Hits", "SpeculateAhead", "likeliest_outcomes"]

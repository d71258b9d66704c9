"""The path for CUDA on any machine."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from mlx_redrafter.target import few_shapes, target


def use_few_shapes(patch: pytest.MonkeyPatch, size: int = 8) -> None:
    """Let trees of new targets attend to whole buckets; buffers grow by as many entries."""
    patch.setattr(target, "pays_on_device", lambda dtype: True)
    patch.setattr(few_shapes, "BUCKET", size)
    for kind in (KVCache, ChunkedKVCache):
        patch.setattr(kind, "step", size)

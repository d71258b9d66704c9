"""The paths for GPUs on any machine."""

import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from mlx_redrafter.target import compiled_pass, few_shapes, target


def use_few_shapes(patch: pytest.MonkeyPatch, size: int = 8) -> None:
    """Let trees of new targets attend to whole buckets; buffers grow by as many entries."""
    patch.setattr(target, "pays_on_device", lambda dtype: True)
    patch.setattr(few_shapes, "BUCKET", size)
    for kind in (KVCache, ChunkedKVCache):
        patch.setattr(kind, "step", size)


def compile_passes(patch: pytest.MonkeyPatch, uses: int) -> None:
    """Let new targets compile the passes over trees, from as many uses of a kind on."""
    patch.setattr(compiled_pass, "waits_for_host", lambda: True)
    patch.setattr(compiled_pass, "USES", uses)

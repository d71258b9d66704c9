"""What tells one target from another: a hash over its weights as they are in memory.

A quantised copy, an adapter or a later checkpoint of the same name has other hidden states, so a
drafter or a cache made with one must not be taken for the other's.
"""

from __future__ import annotations

import hashlib

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint import named_parameters

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fingerprint(model: nn.Module) -> str:
    """A hash of names, shapes, dtypes and all values of the weights; waits for the device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_parameters(model).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype} {_checksums(tensor)}\n".encode())
    return digest.hexdigest()[:16]


def _checksums(tensor: mx.array) -> object:
    """Two sums modulo 2^32 over the bit patterns: of them, and of products of neighbours."""
    bits = tensor.flatten().view(_UNSIGNED[tensor.dtype.size]).astype(mx.uint32)
    return mx.stack([mx.sum(bits), mx.sum(bits[1:] * bits[:-1])]).tolist()

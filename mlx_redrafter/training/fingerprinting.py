"""Fingerprint of a model: a hash over its weights in memory.

A quantised copy, an adapter or a later checkpoint of the same name has other hidden states, so
drafters and caches made with one of them must not be used with another.
"""

from __future__ import annotations

import hashlib

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters

# Unsigned integer dtypes by the size of an element, in bytes.
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fingerprint_weights(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and values of all weights; blocks until MLX has evaluated them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_parameters(model).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype} {_checksums(tensor)}\n".encode())
    return digest.hexdigest()[:16]


def _checksums(tensor: mx.array) -> object:
    """Sum the bit patterns, and the products of neighbouring ones, modulo 2^32."""
    bits = tensor.flatten().view(_UNSIGNED[tensor.dtype.size]).astype(mx.uint32)
    return mx.stack([mx.sum(bits), mx.sum(bits[1:] * bits[:-1])]).tolist()

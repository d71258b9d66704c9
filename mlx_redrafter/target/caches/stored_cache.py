"""Parts of prompt caches as named arrays, to keep them and to put them together again.

K/V entries of layers that attend to all tokens are kept by token, so that a cache can be made of
any number of first tokens. Windows and states are kept whole, for one number of tokens.

Arrays have the name ``LAYER.PART.ARRAY``: a layer with several caches has several parts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.full import Entries, arrays_of, fill_rows
from mlx_redrafter.target.caches.tree_cache import parts_of

Arrays = dict[str, mx.array]
# Kinds of caches whose entries are kept by token.
BY_TOKEN = (KVCache, QuantizedKVCache)


def has_states(layers: Sequence[Any]) -> bool:
    """Whether some layer has a window or a state, which is kept for one number of tokens."""
    return any(not isinstance(part, BY_TOKEN) for part in parts_of(layers))


def count_entries(layers: Sequence[Any]) -> int:
    """Return the number of tokens for which all layers in use have entries."""
    used = [part for part in parts_of(layers) if getattr(part, "keys", None) is not None]
    return min((part.offset for part in used), default=0)


def copy_entries(layers: Sequence[Any], start: int, end: int) -> Arrays:
    """Copy the K/V entries of the tokens ``start`` to ``end`` - 1; blocks until MLX has done it."""
    return _copied(
        {
            f"{place}.{name}": array[..., start:end, :]
            for place, part in _places(layers)
            if isinstance(part, BY_TOKEN) and part.keys is not None
            for name, array in zip(_names(part), arrays_of(part.keys, part.values), strict=True)
        }
    )


def copy_states(layers: Sequence[Any]) -> Arrays:
    """Copy the windows and states; blocks until MLX has done it."""
    return _copied(
        {
            f"{place}.{name}": array
            for place, part in _places(layers)
            if not isinstance(part, BY_TOKEN)
            for name, array in _state(part)
        }
    )


def fill(
    layers: list[Any],
    pieces: Sequence[tuple[Arrays, int]],
    states: Arrays,
    length: int,
    quantisation: Quantisation | None,
) -> None:
    """Fill empty caches, as mlx-lm makes them, with the first ``length`` tokens of a text.

    ``pieces`` are arrays of `copy_entries`, whose tokens follow each other, with the number of
    tokens of each. ``states`` are the arrays of `copy_states` for all tokens. Quantised caches
    replace some of the layers. Raise KeyError if the arrays are those of another kind of cache.
    """
    joined = {
        name: mx.concatenate([piece[name][..., :count, :] for piece, count in pieces], axis=2)[
            ..., :length, :
        ]
        for name in (pieces[0][0] if pieces else ())
    }
    for number, layer in enumerate(layers):
        if f"{number}.0.keys.0" in joined and type(layer) is KVCache:
            assert quantisation is not None
            layers[number] = QuantizedKVCache(quantisation.group_size, quantisation.bits)
    for place, part in _places(layers):
        own = {  # new objects, as mlx-lm's caches assign to parts of theirs
            name.removeprefix(f"{place}."): mx.contiguous(array)
            for name, array in {**joined, **states}.items()
            if name.startswith(f"{place}.")
        }
        if own:
            _fill(part, own, length)


def _places(layers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, layer in enumerate(layers):
        for i, part in enumerate(parts_of([layer])):
            yield f"{number}.{i}", part


def _names(part: Any) -> list[str]:
    """List the names of the arrays of K/V entries: codes, scales and biases if quantised."""
    endings = (".0", ".1", ".2") if isinstance(part, QuantizedKVCache) else ("",)
    return [f"{name}{ending}" for name in ("keys", "values") for ending in endings]


def _state(part: Any) -> Iterator[tuple[str, mx.array]]:
    if isinstance(part, ArraysCache):
        for i, array in enumerate(part.cache):
            if array is not None:
                yield str(i), array
    elif part.keys is not None:
        if isinstance(part, RotatingKVCache):
            size = min(part.offset, part.max_size)
            arrays = [part._temporal_order(one)[..., -size:, :] for one in (part.keys, part.values)]
        else:
            arrays = list(part.keys_and_values())
        yield from zip(("keys", "values"), arrays, strict=True)


def _copied(arrays: Arrays) -> Arrays:
    """Copy arrays, so that they do not hold the larger ones of which they are parts."""
    copies = {name: mx.contiguous(array) for name, array in arrays.items()}
    mx.eval(copies)
    return copies


def _fill(part: Any, arrays: Arrays, length: int) -> None:
    """Fill one cache with arrays named as in `copy_entries` or `copy_states`."""
    if isinstance(part, ArraysCache):
        for name, array in arrays.items():
            part[int(name)] = array
        return
    rows = [arrays[name] for name in _names(part)]
    fill_rows(part, Entries(rows, length - rows[0].shape[2]), length)

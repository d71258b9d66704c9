"""Check before weights are read that a model fits into memory, and what would fit if not."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import mlx.core as mx

from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.memory_estimate import (
    Context,
    MemoryEstimate,
    cache_bytes,
    estimate_memory,
    fused_growth,
    weight_bytes,
)
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.proposers.kind import text_values
from mlx_redrafter.target.architectures import CONTEXT_LENGTH_KEYS

# Share of the memory up to which weights fit without an estimate, which takes a second.
EASY = 0.25
# Tokens up to which that holds.
EASY_TOKENS = 2**15
# Bits that models are quantised to, and the bits per weight with their scales.
BITS = {8: 8.5, 4: 4.5}
# Shortest context to advise, in tokens.
SHORTEST = 1024


def check_memory(
    folder: Path,
    drafter: Path | None,
    context: Context,
    machines: int = 1,
    adapter: str | None = None,
) -> str | None:
    """Check that decoding fits into memory; raise `ResourceError` if it does not.

    The target is split over ``machines`` like this one, which fuse an adapter with it. A drafter
    that is None has no weights of its own. Return a warning if macOS may have to move other
    programs' memory aside.
    """
    total = read_total_memory()
    if total is None:
        return None
    context = context._replace(
        tokens=min(context.tokens, read_context_length(folder) or EASY_TOKENS)
    )
    fused = 0 if adapter is None or machines == 1 else fused_growth(folder, Path(adapter))
    own = (weight_bytes(folder) + fused) // machines
    weights = own + (0 if drafter is None else weight_bytes(drafter))
    if weights < EASY * total and context.tokens <= EASY_TOKENS:
        return None
    needed = estimate_memory(folder, drafter, context)
    needed = needed._replace(weights=own, cache=needed.cache // machines)
    if needed.total > total:
        raise ResourceError(
            f"{_describe(needed, context)}, and this machine has {format_bytes(total)}; "
            f"{_remedies(folder, needed, context, total)}"
        )
    wired = _wired_limit()
    if wired is not None and needed.total > wired:
        return f"{_describe(needed, context)}; above {format_bytes(wired)} macOS slows down"
    return None


def read_context_length(folder: Path) -> int | None:
    """Return the number of tokens that a model was made for; None if its config names none."""
    config = read_config(folder)
    lengths = [{**config, **text_values(config)}.get(key) for key in CONTEXT_LENGTH_KEYS]
    return next((one for one in lengths if isinstance(one, int) and one > 1), None)


def _describe(needed: MemoryEstimate, context: Context) -> str:
    drafter = f", the drafter {format_bytes(needed.drafter)}" if needed.drafter else ""
    return (
        f"the model needs about {format_bytes(needed.total)} of memory (weights "
        f"{format_bytes(needed.weights)}{drafter}, K/V entries of {context.tokens:,} tokens "
        f"{format_bytes(needed.cache)}, a pass {format_bytes(needed.work)})"
    )


def _remedies(folder: Path, needed: MemoryEstimate, context: Context, limit: int) -> str:
    """Say what would fit: no drafter, less for K/V entries, fewer bits."""
    plain, parts = needed._replace(drafter=0), []
    if needed.drafter and plain.total <= limit:
        parts.append("--drafter lookup")
    else:
        prefix = "--drafter lookup with " if needed.drafter else ""
        for changes in (_fewer_kv_bits(context), _shorter_contexts(context)):
            fitting = (
                name
                for name, changed in changes
                if plain._replace(cache=cache_bytes(folder, changed)).total <= limit
            )
            parts += [prefix + name for name in islice(fitting, 1)]
    parts += _fewer_bits(folder, plain, limit)
    return f"what would fit: {', or '.join(parts)}" if parts else "use a smaller model"


def _fewer_kv_bits(context: Context) -> Iterator[tuple[str, Context]]:
    for bits in BITS:
        if context.kv_bits is None or bits < context.kv_bits:
            yield f"--kv-bits {bits}", context._replace(kv_bits=bits)


def _shorter_contexts(context: Context) -> Iterator[tuple[str, Context]]:
    tokens = 1 << (context.tokens - 1).bit_length()
    while (tokens := tokens // 2) >= SHORTEST:
        yield f"a context of {tokens:,} tokens", context._replace(tokens=tokens)


def _fewer_bits(folder: Path, needed: MemoryEstimate, limit: int) -> list[str]:
    """Name the copy with the most bits per weight that fits."""
    quantisation = read_config(folder).get("quantization")
    bits = quantisation.get("bits") if isinstance(quantisation, dict) else 16
    for fewer, size in BITS.items():
        if isinstance(bits, int) and fewer < bits:
            weights = round(needed.weights * size / (16 if bits == 16 else bits + 0.5))
            if needed._replace(weights=weights).total <= limit:
                return [f"a copy of the model in {fewer} bits ({format_bytes(weights)})"]
    return []


def _wired_limit() -> int | None:
    """Return the memory that macOS gives to the GPU, in bytes; None elsewhere."""
    if not mx.metal.is_available():
        return None
    limit = mx.device_info().get("max_recommended_working_set_size")
    return limit if isinstance(limit, int) else None

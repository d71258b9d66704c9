"""Check before weights are read that a model fits into memory, and what would fit if not.

Sizes of weights come from the files, and those of K/V caches from a model of mlx-lm whose random
weights MLX never computes. The working memory of a prompt's chunk depends on MLX's kernels here, so
it is measured on the first layers, one of each kind, with zeros as weights.

Axes: n tokens of the context, T tokens of a chunk of the prompt.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_redrafter.checkpoint_files import named_parameters, read_config, read_shapes, weight_files
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.machines.splitting import ADAPTER_FILES
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.proposers.kind import text_values
from mlx_redrafter.proposers.quantization import check_quantization
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE
from mlx_redrafter.proposers.redrafter.network import MAX_BYTES
from mlx_redrafter.target.architectures import CONTEXT_LENGTH_KEYS
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.model_parts import LAYER_KEYS, find_parts

VOCABULARY_KEYS = ("vocab_size", "padded_vocab_size")
# Share of the memory up to which weights fit without an estimate, which takes a second.
EASY = 0.25
# Tokens up to which that holds.
EASY_TOKENS = 2**15
# Bits that models are quantised to, and the bits per weight with their scales.
BITS = {8: 8.5, 4: 4.5}
# Shortest context to advise, in tokens.
SHORTEST = 1024
# Maximum number of layers of a rehearsal; kinds of layers repeat sooner in all supported models.
MAX_LAYERS = 8
# Rows of the vocabulary in a rehearsal, which computes no logits.
VOCABULARY = 64
# Tokens of the tree whose logits a step keeps in float32, in the widest default plan.
TREE_TOKENS = 16
# Copies of the float32 logits while they are sampled.
COPIES_OF_LOGITS = 3


class MemoryEstimate(NamedTuple):
    """Peak memory of decoding, in bytes: weights of the target, the drafter, caches, work.

    ``drafter`` includes its logits and the table of a recurrent one; ``work`` is the largest
    intermediate arrays.
    """

    weights: int
    drafter: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return sum(self)


class Context(NamedTuple):
    """Length of a sequence, n, and the form of its K/V entries.

    ``chunk`` is the maximum number of prompt tokens per pass, T, and ``kv_bits`` is None for
    entries that are not quantised.
    """

    tokens: int
    chunk: int = GenerationOptions.prefill_step_size
    kv_bits: int | None = None

    @property
    def last_chunk(self) -> int:
        """Number of tokens of a full chunk; the newest token is processed alone."""
        return max(1, min(self.chunk, self.tokens - 1))


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
    tokens = min(context.tokens, read_context_length(folder) or EASY_TOKENS)
    context = context._replace(tokens=tokens)
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
    is_metal, device = mx.metal.is_available(), mx.device_info()
    wired = device.get("max_recommended_working_set_size") if is_metal else None
    if isinstance(wired, int) and needed.total > wired:
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
        fewer_bits = [bits for bits in BITS if bits < (context.kv_bits or 16)]
        coarser = [(f"--kv-bits {bits}", context._replace(kv_bits=bits)) for bits in fewer_bits]
        for changes in (coarser, _shorter_contexts(context)):
            for name, changed in changes:
                if plain._replace(cache=cache_bytes(folder, changed)).total <= limit:
                    parts.append(prefix + name)
                    break
    parts += _fewer_bits(folder, plain, limit)
    return f"what would fit: {', or '.join(parts)}" if parts else "use a smaller model"


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


def estimate_memory(folder: Path, drafter: Path | None, context: Context) -> MemoryEstimate:
    """Estimate the peak memory of decoding one sequence.

    ``drafter`` is None without weights of its own. Raise `CheckpointError` if the config or the
    weight files cannot be read, and `UnsupportedTargetError` if the model cannot be decoded
    exactly.
    """
    config = read_config(folder)
    model = make_model(folder.name, config)
    vocab_size = find_parts(model).vocab_size
    logits = COPIES_OF_LOGITS * TREE_TOKENS * mx.float32.size * vocab_size
    column = vocab_size * _dtype(config).size
    return MemoryEstimate(
        weight_bytes(folder),
        0 if drafter is None else weight_bytes(drafter) + logits + _table_bytes(drafter, column),
        cache_bytes(folder, context),
        max(logits, _rehearse(folder.name, config, model, context)),
    )


def cache_bytes(folder: Path, context: Context) -> int:
    """Return the bytes of a model's caches; the errors are those of `estimate_memory`."""
    config = read_config(folder)
    model = make_model(folder.name, config)
    model.set_dtype(_dtype(config))
    size = 0
    for cache in _fill(model, context.tokens - context.last_chunk, context.last_chunk):
        if context.kv_bits is not None and isinstance(cache, KVCache):
            with suppress(ValueError):  # MLX cannot quantise entries of this size
                cache = cache.to_quantized(GenerationOptions.kv_group_size, context.kv_bits)
        size += cache.nbytes
    return size


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weight files; raise `CheckpointError` if it has none."""
    return sum(path.stat().st_size for path in weight_files(folder))


def fused_growth(folder: Path, adapter: Path) -> int:
    """Return the bytes by which quantised layers grow when a LoRA adapter is fused with them."""
    config = read_config(folder)
    quantisation = config.get("quantization")
    if not isinstance(quantisation, dict):
        return 0
    shapes, size = read_shapes(adapter, [adapter / ADAPTER_FILES[1]]), 0
    for name, shape in shapes.items():
        other = shapes.get(f"{name.removesuffix('a')}b")
        if name.endswith("lora_a") and other is not None and len(shape) > 1 and 0 not in shape:
            rank = shape[-1 if len(shape) == 2 else -2]
            size += math.prod(shape) * math.prod(other) // (math.prod(shape[:-2]) * rank * rank)
    # Quantised layers have two 16-bit numbers per group next to the bits of the elements.
    bits, group_size = _quantisation(quantisation)
    return round(size * (_dtype(config).size - (bits + 32 / group_size) / 8))


def _rehearse(name: str, config: Mapping[str, Any], model: nn.Module, context: Context) -> int:
    """Process the last chunk of a prompt with a few layers of zeros; return its bytes of work."""
    # One more layer, because a prompt's chunk ends with the entries of the last one.
    small = _first_layers(name, config, min(_num_kinds(model) + 1, len(model.layers)))
    cache = _fill(small, context.tokens - context.last_chunk)
    mx.eval(small.parameters(), [layer.state for layer in cache])
    mx.clear_cache()
    mx.reset_peak_memory()
    small(mx.zeros((1, context.last_chunk), mx.int32), cache=cache)
    mx.eval([layer.state for layer in cache])
    work = mx.get_peak_memory() - mx.get_active_memory()
    del small, cache
    mx.clear_cache()
    return max(0, work)


def _table_bytes(drafter: Path, column_bytes: int) -> int:
    """Return the size of the table of input terms that a recurrent drafter makes."""
    values = read_config(drafter)
    hidden = values.get("hidden_size")
    if values.get("model_type") != MODEL_TYPE or not isinstance(hidden, int):
        return 0
    size = hidden * column_bytes
    return size if size <= MAX_BYTES else 0


def _first_layers(name: str, config: Mapping[str, Any], count: int) -> nn.Module:
    """Make a model of a few layers, with few tokens and zeros as weights."""
    changes = dict.fromkeys(LAYER_KEYS, count) | dict.fromkeys(VOCABULARY_KEYS, VOCABULARY)

    def change(values: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = next((values[key] for key in LAYER_KEYS if key in values), None)
        changed = {key: changes.get(key, value) for key, value in values.items()}
        for key, value in values.items():
            if isinstance(value, list) and len(value) == num_layers:
                changed[key] = value[:count]
        return changed

    changed = change(config)
    if text_values(config) is not config:
        changed["text_config"] = change(text_values(config))
    model = make_model(name, changed)
    quantisation = config.get("quantization")
    if isinstance(quantisation, Mapping):
        bits, group_size = _quantisation(quantisation)

        def is_quantisable(_: str, module: Any) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

        nn.quantize(model, group_size, bits, class_predicate=is_quantisable)
    model.set_dtype(_dtype(config))
    model.update(tree_map(mx.zeros_like, model.parameters()))
    model.eval()
    return model


def _quantisation(values: Mapping[str, Any]) -> tuple[int, int]:
    bits: Any = values.get("bits")
    group_size: Any = values.get("group_size")
    check_quantization(bits, group_size)
    return bits, group_size


def _num_kinds(model: Any) -> int:
    """Return the number of first layers among which there is one of every kind."""
    caches = make_prompt_cache(model)
    kinds: list[object] = []
    for i, layer in enumerate(model.layers):
        cache = caches[i] if len(caches) == len(model.layers) else None
        weights = sorted((name, array.shape) for name, array in named_parameters(layer).items())
        kinds.append((weights, type(cache), getattr(cache, "max_size", None)))
    return min(max(map(kinds.index, kinds)) + 1, MAX_LAYERS)


def _fill(model: nn.Module, before: int, last: int = 0) -> list[Any]:
    """Make caches with the entries of a prompt and its last chunk, and with states of one token.

    MLX has computed none of them.
    """
    known = make_prompt_cache(model)
    model(mx.array([[0]]), cache=known)
    empty = make_prompt_cache(model)
    return [_filled(*layer, before, last) for layer in zip(empty, known, strict=True)]


def _filled(cache: Any, known: Any, before: int, last: int) -> Any:
    if isinstance(cache, CacheList):
        parts = zip(cache.caches, known.caches, strict=True)
        return CacheList(*(_filled(*part, before, last) for part in parts))
    if not isinstance(cache, (KVCache, RotatingKVCache)) or known.keys is None:
        return known
    for size in filter(None, (min(before, getattr(cache, "max_size", before)), last)):
        keys, values = (
            mx.zeros((*array.shape[:2], size, array.shape[3]), array.dtype)
            for array in (known.keys, known.values)
        )
        cache.update_and_fetch(keys, values)
    return cache


def _dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """Return the dtype of the weights; models without one are in bfloat16."""
    for values in (config, text_values(config)):
        for key in ("torch_dtype", "dtype"):
            dtype = getattr(mx, str(values.get(key)).removeprefix("torch."), None)
            if isinstance(dtype, mx.Dtype):
                return dtype
    return mx.bfloat16

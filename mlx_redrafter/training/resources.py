"""Estimate of the disk and memory of a run, and the check before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.proposers.fit import TOP_TOKENS
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import batches, trainer
from mlx_redrafter.training.corpus import DEFAULT_PASSES, Sources, count_generated
from mlx_redrafter.training.data import CHARS_PER_TOKEN, Chat, Document, Encoder, Item
from mlx_redrafter.training.duration import LEAST_SHARE, Timetable, Workload, format_stages
from mlx_redrafter.training.self_generated import CACHE_STEP, can_batch, count_texts, measure_cache
from mlx_redrafter.training.teacher import LOGITS_BYTES, SHARD_TOKENS, TOP_K
from mlx_redrafter.training.training_request import TrainingRequest

# Usable share of the machine's memory.
USABLE_MEMORY = 0.85
# Copies of the weights in the state file: weights, two moments, average, best average.
COPIES_IN_STATE = 5
# Copies of the weights in memory: those of the state, and the gradient twice while it is clipped.
COPIES_IN_MEMORY = 7
# Peak of the caches of a round, relative to their size; 1.17 as measured with a Llama of 8 layers,
# as a layer's cache is copied when it grows.
GROWING_CACHES = 1.2
# Copies of the logits in memory: logits, exponentials, gradients, values for the backward pass.
COPIES_OF_LOGITS = 5
# Size of an element of the drafter's weights on disk, in bytes.
FLOAT16 = 2
# Number of texts that measure the characters per token.
SAMPLED_TEXTS = 16
# Mean number of tokens of the beginning of a text that serves as a prompt.
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class ResourceEstimate:
    """Upper estimates: tokens of all sequences, and sizes in bytes.

    ``cache`` is for the target's outputs, ``disk`` for cache, state and drafter; ``memory`` is the
    peak.
    """

    tokens: int
    cache: int
    drafter: int
    disk: int
    memory: int

    def __str__(self) -> str:
        return (
            f"about {self.tokens:,} tokens, {format_bytes(self.disk)} of disk (the model's outputs "
            f"{format_bytes(self.cache)}, the drafter {format_bytes(self.drafter)}), "
            f"{format_bytes(self.memory)} of memory"
        )


@dataclass(frozen=True)
class TargetSize:
    """Sizes of a target.

    ``float_bytes`` is that of an element of a hidden state, and ``cache_bytes`` that of the cache
    of a text of up to `CACHE_STEP` tokens.
    """

    hidden_size: int
    vocab_size: int
    weight_bytes: int
    float_bytes: int = 2
    cache_bytes: int = 0

    @classmethod
    def of(cls, target: Target) -> TargetSize:
        return cls(
            target.hidden_size,
            target.vocab_size,
            sum(array.nbytes for array in named_parameters(target.model).values()),
            target.modules.dtype.size,
            measure_cache(target.model) if can_batch(target.model) else 0,
        )


def count_weights(network: nn.Module) -> int:
    """Count the weights of a network, which need not be computed."""
    return sum(array.size for array in named_parameters(network).values())


def count_work(sources: Sources, encoder: Encoder, request: TrainingRequest) -> Workload:
    """Estimate the work of a run, from characters unless the options limit the tokens."""
    options = request.data_options
    share = sources.generated_share(options)
    rate = _measure_chars_per_token(sources, encoder)
    given = sum(_guess_tokens(item, rate) for item in sources.given)
    chats = [_guess_tokens(item, rate) for item in sources.prompts if isinstance(item, Chat)]
    prompt = sum(chats) // len(chats) if chats else PROMPT_TOKENS
    generated = count_generated(given, share, options)
    if options.tokens is not None:
        given = min(given, round((1 - share) * options.tokens))
    if generated is None:
        given, generated = 0, DEFAULT_PASSES * len(sources.prompts) * options.answer_tokens
    return Workload.of(request, given, generated, prompt, len(sources.held_out))


def estimate(
    work: Workload,
    size: TargetSize,
    num_weights: int,
    num_layers: int = 0,
    keeps_target: bool = False,
) -> ResourceEstimate:
    """Estimate the resources for training a drafter of ``num_weights`` weights.

    It reads the inputs of ``num_layers`` layers. With ``keeps_target`` the target stays in memory
    while it is trained.
    """
    hidden, vocab = size.hidden_size, size.vocab_size
    k = min(TOP_K, vocab)
    per_token = 2 * hidden * (1 + num_layers) + 6 * k + 9
    held_out = work.held_out * 6 * (min(TOP_TOKENS, vocab) - k)
    cache = work.tokens * per_token + held_out
    texts = count_texts(size.cache_bytes)
    shard = max(SHARD_TOKENS, texts * work.text_tokens) * per_token
    group = 2 * min(cache, batches.GROUP_BYTES + shard)
    # Three copies of the head as a float32 matrix: joined, for numpy, and projected.
    heads = 3 * 4 * vocab * hidden
    reading = 3 * LOGITS_BYTES + 2 * min(cache, shard)
    caches = texts * size.cache_bytes * max(1.0, work.text_tokens / CACHE_STEP)
    generating = round(GROWING_CACHES * caches) + 2 * min(cache, shard)
    steps = COPIES_IN_MEMORY * 4 * num_weights + COPIES_OF_LOGITS * trainer.LOGITS_BYTES
    # A rehearsal runs training steps while the target is in memory.
    filling = size.weight_bytes + max(heads, reading, generating, steps)
    kept = size.weight_bytes if keeps_target else vocab * hidden * size.float_bytes
    training = steps + group + kept
    drafter = FLOAT16 * num_weights
    return ResourceEstimate(
        work.tokens,
        cache,
        drafter,
        # A file is replaced once the new one is complete.
        disk=cache + 2 * (COPIES_IN_STATE * 4 * num_weights + drafter),
        # Training loads the held-out texts as a whole, and keeps them.
        memory=max(filling, training) + 2 * held_out,
    )


def check_resources(needed: ResourceEstimate, cache: Path, out: Path) -> None:
    """Raise `ResourceError` unless disks and memory suffice; shards in ``cache`` are reused."""
    # Not the incomplete files of other runs and of killed ones.
    present = sum(path.stat().st_size for path in cache.rglob("[!.]*.safetensors"))
    wanted: dict[int, tuple[Path, int]] = {}
    missing = max(0, needed.cache - present)
    for folder, size in ((out, needed.disk - needed.cache), (cache, missing)):
        existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
        device = read_device(existing)
        wanted[device] = existing, size + wanted.get(device, (existing, 0))[1]
    for folder, size in wanted.values():
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ResourceError(
                f"training needs {format_bytes(size)} of disk in {folder}, found "
                f"{format_bytes(free)} free; free some, or use fewer --tokens"
            )
    memory = read_total_memory()
    if memory is not None and needed.memory > USABLE_MEMORY * memory:
        raise ResourceError(
            f"training needs {format_bytes(needed.memory)} of memory, of "
            f"{format_bytes(memory)} {USABLE_MEMORY:.0%} can be used; use a smaller "
            "--exit-dim or a smaller model"
        )


def read_device(path: Path) -> int:
    """Read the number of the disk that a file or a folder is on."""
    return path.stat().st_dev


def check_minutes(timetable: Timetable, minutes: float) -> None:
    """Raise `ResourceError` unless the minutes for a whole run leave enough for training."""
    if timetable.stages["training"] < LEAST_SHARE * 60 * minutes:
        others = {name: time for name, time in timetable.stages.items() if name != "training"}
        raise ResourceError(
            f"--minutes {minutes:g} is for the whole run, of which too little is left for training "
            f"on this machine ({format_stages(others)}); give more --minutes or fewer --tokens"
        )


def _measure_chars_per_token(sources: Sources, encoder: Encoder) -> float:
    texts = [item for item in [*sources.given, *sources.prompts] if isinstance(item, Document)]
    chars = tokens = 0
    for text in texts[:SAMPLED_TEXTS]:
        chars += len(text.text)
        tokens += sum(map(len, encoder.encode(text)))
    return chars / tokens if tokens else CHARS_PER_TOKEN


def _guess_tokens(item: Item, chars_per_token: float) -> int:
    if isinstance(item, Document):
        return round(len(item.text) / chars_per_token) + 1
    return sum(round(len(str(m["content"])) / chars_per_token) + 8 for m in item.messages)

"""Estimate of the disk and memory of a run, and the check before it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_reduce

from mlx_redrafter.errors import ResourceError
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import batches, teacher, trainer
from mlx_redrafter.training.corpus import DEFAULT_PASSES, Sources
from mlx_redrafter.training.data import CHARS_PER_TOKEN, Conversation, Document, Item
from mlx_redrafter.training.options import DataOptions, LossOptions

# Usable share of the machine's memory.
USABLE_MEMORY = 0.85
# Copies of the weights in the state file: weights, two moments, average, best average.
COPIES_IN_STATE = 5
# Copies of the weights in memory: those of the state, and the gradient twice while it is clipped.
COPIES_IN_MEMORY = 7
# Copies of the logits in memory: logits, exponentials, gradients, values for the backward pass.
COPIES_OF_LOGITS = 5


@dataclass(frozen=True)
class Estimate:
    """Upper estimates of the resources of a run.

    Attributes:
        tokens: Number of tokens of all sequences, prompts included.
        disk: Size of cache, state and drafter on disk, in bytes.
        memory: Peak memory, in bytes.
    """

    tokens: int
    disk: int
    memory: int

    def __str__(self) -> str:
        return (
            f"about {self.tokens:,} tokens, {_format_gigabytes(self.disk)} of disk, "
            f"{_format_gigabytes(self.memory)} of memory"
        )


def count_drafter_weights(config: DrafterConfig) -> int:
    """Count the weights of a drafter."""
    hidden, width = config.hidden_size, config.exit_dim
    count = width * config.head_rows + config.num_draft_layers * (width + 1) * width
    if config.has_input_proj:
        count += (2 * hidden + 1) * width
    return count + (2 * hidden + 1) * hidden * config.rnn


def estimate_tokens(sources: Sources, options: DataOptions) -> int:
    """Estimate the tokens of all sequences, from characters unless the options limit them."""
    share = options.written_share if sources.given else 1.0
    given = sum(map(_guess_tokens, sources.given))
    answers = options.answer_tokens
    if options.max_tokens is not None:
        given = min(given, round((1 - share) * options.max_tokens))
        generated = round(share * options.max_tokens)
    elif share < 1:
        generated = round(given * share / (1 - share))
    else:
        given, generated = 0, DEFAULT_PASSES * len(sources.prompts) * answers
    prompts = _guess_prompt_tokens(sources.prompts) * (generated // answers + 1)
    return given + generated + prompts + len(sources.held_out) * answers


def estimate(
    num_tokens: int,
    num_held_out: int,
    k: int,
    held_out_k: int,
    loss: LossOptions,
    beam_length: int,
    target: Target,
    config: DrafterConfig,
) -> Estimate:
    """Estimate the resources for training a drafter.

    Args:
        num_tokens: Number of tokens of all texts.
        num_held_out: Number of tokens of the held-out texts, which ``num_tokens`` includes.
        k: Number of next tokens whose log-probabilities are kept.
        held_out_k: Number of next tokens kept for held-out texts, at least ``k``.
        loss: Training objective.
        beam_length: L, root included.
        target: The teacher.
        config: The drafter's shape.
    """
    hidden, vocab = target.hidden_size, target.vocab_size
    per_token = 2 * hidden + 6 * min(k, vocab) + 9
    if loss.recipe == "rollouts":
        per_token += 4 * beam_length
    weights = 4 * count_drafter_weights(config)
    held_out = num_held_out * 6 * (min(held_out_k, vocab) - min(k, vocab))
    cache = num_tokens * per_token + held_out
    model = tree_reduce(lambda total, value: total + value.nbytes, target.model.parameters(), 0)
    group = 2 * min(cache, batches.GROUP_BYTES + teacher.SHARD_TOKENS * per_token)
    # Three copies of the head as a float32 matrix: joined, for numpy, and projected.
    heads = 3 * 4 * vocab * hidden
    reading = 3 * teacher.LOGITS_BYTES + 2 * teacher.SHARD_TOKENS * per_token
    filling = model + max(heads, reading)
    embedding = vocab * hidden * target.embed(mx.zeros((1,), dtype=mx.int32)).dtype.size
    training = (
        COPIES_IN_MEMORY * weights + group + embedding + COPIES_OF_LOGITS * trainer.LOGITS_BYTES
    )
    disk = cache + (COPIES_IN_STATE + 1) * weights
    # Held-out texts are read in one piece, and kept during training.
    return Estimate(num_tokens, disk, max(filling, training) + 2 * held_out)


def check_resources(needed: Estimate, folder: Path) -> None:
    """Raise `ResourceError` unless disk and memory suffice.

    Args:
        needed: Estimate of the run.
        folder: Folder of the files to write; shards in it are not written again.

    Raises:
        ResourceError: There is not enough free disk or not enough memory.
    """
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    present = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(existing).free
    if needed.disk - present > free:
        raise ResourceError(
            f"training needs {_format_gigabytes(needed.disk - present)} of disk in {folder}, found "
            f"{_format_gigabytes(free)} free; free some, or use fewer --tokens"
        )
    memory = read_total_memory()
    if memory is not None and needed.memory > USABLE_MEMORY * memory:
        raise ResourceError(
            f"training needs {_format_gigabytes(needed.memory)} of memory, of "
            f"{_format_gigabytes(memory)} {USABLE_MEMORY:.0%} can be used; use a smaller "
            "--exit-dim or a smaller model"
        )


def read_total_memory() -> int | None:
    """Read the machine's memory in bytes, None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _guess_tokens(item: Item) -> int:
    if isinstance(item, Document):
        return len(item.text) // CHARS_PER_TOKEN + 1
    return sum(len(str(m["content"])) // CHARS_PER_TOKEN + 8 for m in item.messages)


def _guess_prompt_tokens(items: Sequence[Item]) -> int:
    """Guess the mean tokens of a prompt."""
    chats = [_guess_tokens(item) for item in items if isinstance(item, Conversation)]
    return sum(chats) // len(chats) if chats else 32


def _format_gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"

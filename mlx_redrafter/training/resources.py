"""What a run will need, computed before it starts, and the refusal when there is not enough."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_reduce

from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.errors import ResourceError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import batches, teacher, trainer
from mlx_redrafter.training.corpus import DEFAULT_PASSES, Sources
from mlx_redrafter.training.data import CHARS_PER_TOKEN, Conversation, Document, Item
from mlx_redrafter.training.options import DataOptions, LossOptions

# Share of the memory that a process may plan with.
USABLE_MEMORY = 0.85
# Weights, two moments, average, best average; gradient twice while it is clipped.
COPIES_IN_STATE, COPIES_IN_MEMORY = 5, 7
# Logits, their exponentials, gradients and what is kept for the way back.
COPIES_OF_LOGITS = 5


@dataclass(frozen=True)
class Estimate:
    """Upper estimates.

    Attributes:
        tokens: Tokens of all sequences, prompts included.
        disk: Bytes of cache, state and drafter.
        memory: Bytes at the peak.
    """

    tokens: int
    disk: int
    memory: int

    def __str__(self) -> str:
        return (
            f"about {self.tokens:,} tokens, {_gigabytes(self.disk)} of disk, "
            f"{_gigabytes(self.memory)} of memory"
        )


def count_drafter(config: DrafterConfig) -> int:
    """Weights of a drafter."""
    hidden, width = config.hidden_size, config.exit_dim
    count = width * config.head_rows + config.num_draft_layers * (width + 1) * width
    if config.has_input_proj:
        count += (2 * hidden + 1) * width
    return count + (2 * hidden + 1) * hidden * config.rnn


def estimate_tokens(sources: Sources, options: DataOptions) -> int:
    """Tokens of all sequences, guessed from characters where nothing limits them."""
    share = options.written_share if sources.given else 1.0
    given = sum(map(_guess_tokens, sources.given))
    answers = options.answer_tokens
    if options.max_tokens is not None:
        given = min(given, round((1 - share) * options.max_tokens))
        written = round(share * options.max_tokens)
    elif share < 1:
        written = round(given * share / (1 - share))
    else:
        given, written = 0, DEFAULT_PASSES * len(sources.prompts) * answers
    prompts = _guess_prompts(sources.prompts) * (written // answers + 1)
    return given + written + prompts + len(sources.held_out) * answers


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
    """What training a drafter of this shape on so many tokens takes.

    Args:
        num_tokens: Of all texts.
        num_held_out: Of these, in held-out texts.
        k: Next tokens whose log-probabilities are kept.
        held_out_k: The same for held-out texts, at least k.
        loss: What is carried_over.
        beam_length: L, root included.
        target: The teacher.
        config: The drafter's shape.
    """
    hidden, vocab = target.hidden_size, target.vocab_size
    per_token = 2 * hidden + 6 * min(k, vocab) + 9
    if loss.recipe == "rollouts":
        per_token += 4 * beam_length
    weights = 4 * count_drafter(config)
    held_out = num_held_out * 6 * (min(held_out_k, vocab) - min(k, vocab))
    cache = num_tokens * per_token + held_out
    model = tree_reduce(lambda total, value: total + value.nbytes, target.model.parameters(), 0)
    group = 2 * min(cache, batches.GROUP_BYTES + teacher.SHARD_TOKENS * per_token)
    # The head as a float32 matrix: joined, for numpy, and projected.
    heads = 3 * 4 * vocab * hidden
    reading = 3 * teacher.LOGITS_BYTES + 2 * teacher.SHARD_TOKENS * per_token
    teaching = model + max(heads, reading)
    embedding = vocab * hidden * target.embed(mx.zeros((1,), dtype=mx.int32)).dtype.size
    learning = (
        COPIES_IN_MEMORY * weights + group + embedding + COPIES_OF_LOGITS * trainer.LOGITS_BYTES
    )
    disk = cache + (COPIES_IN_STATE + 1) * weights
    # Held-out texts are read in one piece, and kept while the drafter learns.
    return Estimate(num_tokens, disk, max(teaching, learning) + 2 * held_out)


def check_resources(needed: Estimate, folder: Path) -> None:
    """Refuse what does not fit.

    Args:
        needed: What is needed.
        folder: Where files will be written; what is there already counts as written.

    Raises:
        ResourceError: There is not enough free disk or not enough memory.
    """
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    present = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(existing).free
    if needed.disk - present > free:
        raise ResourceError(
            f"training needs {_gigabytes(needed.disk - present)} of disk in {folder}, "
            f"{_gigabytes(free)} are free; free some, or use fewer --tokens"
        )
    memory = total_memory()
    if memory is not None and needed.memory > USABLE_MEMORY * memory:
        raise ResourceError(
            f"training needs {_gigabytes(needed.memory)} of memory, of {_gigabytes(memory)} "
            f"{USABLE_MEMORY:.0%} can be used; use a smaller --exit-dim or a smaller model"
        )


def total_memory() -> int | None:
    """Bytes of memory of the machine, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _guess_tokens(item: Item) -> int:
    if isinstance(item, Document):
        return len(item.text) // CHARS_PER_TOKEN + 1
    return sum(len(str(m["content"])) // CHARS_PER_TOKEN + 8 for m in item.messages)


def _guess_prompts(items: Sequence[Item]) -> int:
    """Mean tokens of a prompt."""
    chats = [_guess_tokens(item) for item in items if isinstance(item, Conversation)]
    return sum(chats) // len(chats) if chats else 32


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"

"""Block drafters: DFlash, DFlash 2 and DSpark, which draft several tokens in one pass."""

from functools import partial
from pathlib import Path

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.published import is_block_drafter, read_published, resolve_stored
from mlx_redrafter.proposers.checkpoint import MASK_FILE, Checkpoint
from mlx_redrafter.proposers.kind import UNKNOWN, TargetFacts
from mlx_redrafter.proposers.layer_sizes import build

NAME = "block drafter"
recognise = is_block_drafter


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> BlockNetwork:
    """Load a drafter as published in safetensors, or as `convert` writes it."""
    stored = Checkpoint(path_or_repo)
    check_masks(stored.folder)
    config, names = read_published(stored.config, stored.shapes)
    target.check(config)
    resolve = partial(resolve_stored, values=stored.config)
    return stored.fill(build(BlockNetwork, config), names, resolve)


def check_masks(folder: Path) -> None:
    """Raise `CheckpointError` if a drafter has an embedding of its own for masks."""
    if (folder / MASK_FILE).exists():
        raise CheckpointError(
            f"this block drafter has an embedding of its own for masks ({MASK_FILE}), which is not "
            "supported; use another head"
        )

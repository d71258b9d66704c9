"""Token ids of a checkpoint, read from its files without loading a tokenizer."""

from __future__ import annotations

import filecmp
from pathlib import Path

from mlx_redrafter.checkpoint_files import read_json
from mlx_redrafter.errors import CheckpointError

# Files of a tokenizer: the first is JSON, the second is SentencePiece's.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def has_same_tokens(one: Path, other: Path) -> bool:
    """Return whether two folders give the same tokens the same ids, as far as their files show.

    Folders whose tokenizers are in files of different kinds count as different.
    """
    for name in TOKENIZER_FILES:
        paths = one / name, other / name
        if all(path.is_file() for path in paths):
            if filecmp.cmp(*paths, shallow=False):
                return True
            ours, theirs = map(_read_table, paths)
            return ours is not None and ours == theirs
    return False


def _read_table(path: Path) -> object:
    """Read the tokens of a JSON file with their ids; None for other and for damaged files."""
    try:
        values = read_json(path)
        model, added = values["model"], values.get("added_tokens") or []
        return model["vocab"], sorted((token["id"], token["content"]) for token in added)
    except (CheckpointError, KeyError, TypeError):
        return None

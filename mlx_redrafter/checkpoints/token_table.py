"""Token ids of a checkpoint, read from its files without loading a tokenizer."""

import filecmp
import hashlib
import json
from pathlib import Path

from mlx_redrafter.checkpoint_files import read_json
from mlx_redrafter.errors import CheckpointError

# Files of a tokenizer: the first is JSON, the second is SentencePiece's.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def has_same_tokens(one: Path, other: Path) -> bool:
    """Return whether two folders give the same tokens the same ids, as far as their files show.

    Tokenizers in files of different kinds count as different.
    """
    for name in TOKENIZER_FILES:
        paths = one / name, other / name
        if all(path.is_file() for path in paths):
            if filecmp.cmp(*paths, shallow=False):
                return True
            ours, theirs = map(_read_table, paths)
            return ours is not None and ours == theirs
    return False


def digest_tokens(folder: Path) -> str | None:
    """Hash the tokens of a folder with their ids; None without a readable ``tokenizer.json``.

    Programs store special tokens among the others, apart from them, or both.
    """
    path = folder / TOKENIZER_FILES[0]
    table = _read_table(path) if path.is_file() else None
    if table is None:
        return None
    vocabulary, added = table
    ids = {**vocabulary, **{token: number for number, token in added}}
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()[:16]


def _read_table(path: Path) -> tuple[dict[str, int], list[tuple[int, str]]] | None:
    """Read the tokens of a JSON file with their ids; None for other and for damaged files."""
    try:
        values = read_json(path)
        model, added = values["model"], values.get("added_tokens") or []
        return dict(model["vocab"]), sorted((token["id"], token["content"]) for token in added)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None

"""Identity of a model: the names, sizes and tokens by which a drafter knows it.

A model that is stored in another way, such as a quantised copy, is the same model. A model that was
trained further is another one, even if its sizes and most of its name are equal. Tokens are read
from files, without loading a tokenizer.
"""

import filecmp
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from mlx_redrafter.checkpoint_files import read_config, read_json
from mlx_redrafter.checkpoints.cards import Card, read_card
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.model_store import repository_of
from mlx_redrafter.proposers.kind import TargetFacts, text_values

# Parts of a name that tell how weights are stored. "it", "Instruct", "Lite" and "qat" are not among
# them: they name other weights.
STORED = re.compile(
    r"[-_.](mlx|gguf|dwq|optiq|nvfp4|mxfp[48]|fp(8|16|32)|float(16|32)|bf16|int[48]|awq|gptq|[2-8]-?bits?"
    r"|q[2-8](_[k01])?(_[msl])?|g(32|64|128)|hi|ud)(?=[-_.]|$)",
    re.IGNORECASE,
)
# Form of a repository's name.
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Files of a tokenizer: the first is JSON, the second is SentencePiece's.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class Identity(NamedTuple):
    """A model, as drafters know it: its plain names, and the object in its ``config.json``.

    ``folder`` has its files; None if they are not on this machine.
    """

    names: frozenset[str]
    config: Mapping[str, Any]
    folder: Path | None = None

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], card: Card) -> Self:
        """Identify a model by its name, its config and its card.

        The base model of the card is this model if the card says that this is a quantised copy.
        """
        bases = card.base_models if card.is_quantised and len(card.base_models) == 1 else ()
        return cls(frozenset(map(plain_name, (name, *bases))), config)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Identify the model in a folder, also by the name of a link to it.

        Raise `CheckpointError` if its config cannot be read.
        """
        identity = cls.of(repository_of(folder), read_config(folder), read_card(folder))
        own = {plain_name(folder.name)} if folder.is_symlink() else set()
        return identity._replace(names=identity.names | own, folder=folder)

    def is_named(self, *names: str) -> bool:
        return any(plain_name(name) in self.names for name in names)

    def contradiction(self, config: Mapping[str, Any]) -> str | None:
        """Return the reason why a drafter was made for another model; None without one.

        ``config`` is the object in the drafter's ``config.json``; its values may be of any type.
        """
        # A path of the machine that trained it names nothing.
        named = [name for name in targets_in_config(config) if REPOSITORY.fullmatch(name)]
        if named and not self.is_named(*named):
            return f"it was made for {named[0]}"
        tokens = as_mapping(config.get("target")).get("tokens")
        own = digest_tokens(self.folder) if tokens is not None and self.folder else None
        if own is not None and own != tokens:
            return "its tokens are not the model's"
        target = TargetFacts.of("", self.config)
        sizes = as_mapping(config.get("transformer_layer_config")) or config
        nested = as_mapping(config.get("dflash_config"))
        hidden, vocab = sizes.get("hidden_size"), sizes.get("vocab_size")
        if _differ(hidden, target.hidden_size):
            return f"its hidden_size {hidden} is not the model's {target.hidden_size}"
        if _exceeds(vocab, target.vocab_size):
            return f"its vocab_size {vocab} is not the model's {target.vocab_size}"
        count = text_values(self.config).get("num_hidden_layers")
        for said in (config.get("num_target_layers"), nested.get("num_target_layers")):
            if _differ(said, count):
                return f"it reads a model of {said} layers, not of {count}"
        for key in ("aux_hidden_state_layer_ids", "target_layer_ids"):
            read = config.get(key, nested.get(key))
            layers_read = [i for i in read if type(i) is int] if type(read) is list else []
            deepest = max(layers_read, default=0)
            if _exceeds(deepest, count):
                return f"it reads layer {deepest} of a model of {count} layers"
        return None


def plain_name(name: str) -> str:
    """Return a model's name without its owner, and without the way in which it is stored."""
    plain, before = name.rstrip("/").rpartition("/")[2], ""
    while plain != before:
        before, plain = plain, STORED.sub("", plain)
    return re.sub(r"[-_.\s]", "", plain).lower()


def targets_in_config(config: Mapping[str, Any]) -> list[str]:
    """Return the models that a drafter's config names as its target."""
    verifier = as_mapping(as_mapping(config.get("speculators_config")).get("verifier"))
    named = (
        verifier.get("name_or_path"),
        as_mapping(config.get("target")).get("name"),
        config.get("base_model_name_or_path"),
    )
    return [name for name in named if isinstance(name, str) and name]


def _differ(one: object, other: object) -> bool:
    return type(one) is int and type(other) is int and one != other


def _exceeds(one: object, other: object) -> bool:
    return type(one) is int and type(other) is int and one > other


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

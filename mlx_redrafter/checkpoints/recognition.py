"""Recognition of drafters: the kind of a name or folder, from config and tensor headers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter import proposers
from mlx_redrafter.checkpoint_files import find_checkpoint, has_weights, read_config, read_shapes
from mlx_redrafter.errors import CheckpointError, ConfigError, quote
from mlx_redrafter.proposers import draft_model, redrafter
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
from mlx_redrafter.proposers.kind import Kind
from mlx_redrafter.proposers.mtp.families import SIDECAR, has_family
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE
from mlx_redrafter.target.model_parts import check_config

# Values of ``speculators_model_type`` whose drafters load.
KNOWN_SPECULATORS = (None, "eagle3", "peagle", "recurrent_drafting", "dflash", "dflash2", "dspark")


def is_word(drafter: str | Path | None, word: str, does: str = "") -> bool:
    """Return whether a drafter's name is a word that stands for a kind, such as "lookup".

    Raise `ConfigError` if it is a folder as well; ``does`` is what any other word does.
    """
    if drafter == word and Path(word).is_dir():
        does = does or f"means a drafter ({proposers.WORDS[word].NAME})"
        raise ConfigError(
            f"{word!r} {does}, and is a folder here as well; say ./{word} for the folder, or go to "
            "another one"
        )
    return drafter == word


def find_kind(drafter: str | Path, target: str = "") -> Kind:
    """Return the kind that a word, a folder or a repository stands for; see `recognise`."""
    named = (kind for word, kind in proposers.WORDS.items() if is_word(drafter, word))
    return next(named, None) or recognise(drafter, target)[0]


def recognise(drafter: str | Path, target: str = "") -> tuple[Kind, dict[str, Any]]:
    """Return the kind of a folder or repository, and its config; reads no weights."""
    folder = find_checkpoint(drafter, CONFIG_ONLY, target)
    config = read_config(folder)
    refused = find_refused(config)
    if refused is not None:
        raise CheckpointError(
            f"{drafter} is a {refused}, which is not supported; use a recurrent drafter, an EAGLE "
            "head, Medusa heads, an MTP module, a block drafter (DFlash, DSpark), a Gemma 4 "
            "assistant, a SpecFormer or a smaller model of the same tokens"
        )
    # `load` downloads the weights of a repository after its config has named the kind.
    shapes = read_shapes(folder) if has_weights(folder) else {}
    pickles = [path for name in ("*.bin", "*.pt") for path in folder.glob(name)]
    if not shapes and pickles:
        raise CheckpointError(
            f"expected model*.safetensors in {folder}, found pickled weights; those of drafters "
            "become loadable by `redrafter-mlx convert`"
        )
    kinds = [kind for kind in proposers.KINDS if kind.recognise(config, shapes)]
    # A published head may copy the config of a model. A recurrent drafter has a type of its own.
    is_copied = redrafter not in kinds or config.get("model_type") == MODEL_TYPE
    if len(kinds) > 1 and is_copied:
        kinds = [kind for kind in kinds if kind is not draft_model]
    if len(kinds) > 1:
        raise CheckpointError(
            f"{drafter} has the signs of several kinds of drafters: "
            f"{', '.join(kind.NAME for kind in kinds)} (model_type {config.get('model_type')!r} in "
            "config.json, and the tensors); give a folder with one of them"
        )
    # The recurrent drafter's loader reports what its config lacks.
    kind = kinds[0] if kinds else redrafter
    if kind is draft_model:
        check_config(config)
    return kind, config


def find_refused(config: Mapping[str, Any]) -> str | None:
    """Name the format that a config describes, if it is one that is not supported."""
    architectures = config.get("architectures")
    speculator = config.get("speculators_model_type")
    said = [config.get("model_type"), speculator]
    said += architectures if isinstance(architectures, list) else []
    letters = " ".join(re.sub("[^a-z0-9]", "", str(one).lower()) for one in said)
    if "mlpspeculator" in letters:
        return "MLP speculator"
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type.endswith(SIDECAR) and not has_family(config):
        return f"module with multi-token prediction alone (model_type {quote(model_type)})"
    if speculator not in KNOWN_SPECULATORS:
        return f"drafter of speculators_model_type {speculator!r}"
    return None

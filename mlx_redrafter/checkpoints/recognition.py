"""What a drafter's name or folder stands for, from its config and the headers of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from mlx_redrafter.checkpoint_files import find_checkpoint, has_weights, read_config, read_shapes
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.eagle.published import is_eagle
from mlx_redrafter.proposers.medusa.layouts import is_medusa
from mlx_redrafter.proposers.mtp.families import is_mtp
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE
from mlx_redrafter.proposers.specformer.config import MODEL_TYPE as SPECFORMER
from mlx_redrafter.target.model_parts import check_config

CONFIG_ONLY = ["config.json"]
PICKLES = (".bin", ".pt")
LOOKUP, MTP = "lookup", "mtp"
WORDS = {LOOKUP: "drafts out of the text itself", MTP: "the MTP module of the model itself"}

Kind = Literal[
    "recurrent drafter", "EAGLE head", "Medusa heads", "MTP module", "SpecFormer", "draft model"
]
Shapes = Mapping[str, tuple[int, ...]]
# Formats that are not supported, as configs name them, without signs between the letters.
REFUSED: Mapping[str, str] = {
    "dflash": "DFlash drafter, which drafts blocks from states of many layers",
    "dspark": "DSpark drafter, which drafts blocks",
    "peagle": "P-EAGLE head, which drafts several tokens in parallel",
    "gemma4assistant": "Gemma 4 assistant, which reads the target's own keys and values",
    "mlpspeculator": "MLP speculator",
}


def _is_recurrent(config: Mapping[str, Any], shapes: Shapes) -> bool:
    has_tensors = any(name.startswith(("rnn_u.", "rnn_w.", "lm_head.0.")) for name in shapes)
    return config.get("model_type") == MODEL_TYPE or has_tensors


def _is_specformer(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == SPECFORMER


# Signs of networks that `load` takes.
NETWORKS: Mapping[Kind, Callable[[Mapping[str, Any], Shapes], bool]] = {
    "EAGLE head": is_eagle,
    "Medusa heads": is_medusa,
    "MTP module": is_mtp,
    "SpecFormer": _is_specformer,
}


def _is_model(config: Mapping[str, Any], shapes: Shapes) -> bool:
    others = _is_recurrent(config, {}), *(sign(config, shapes) for sign in NETWORKS.values())
    return "model_type" in config and not any(others)


# Signs of every kind: config.json, and the tensors.
SIGNS: Mapping[Kind, Callable[[Mapping[str, Any], Shapes], bool]] = {
    "recurrent drafter": _is_recurrent,
    **NETWORKS,
    "draft model": _is_model,
}


def is_word(drafter: str | Path | None, word: str) -> bool:
    """Whether a word that stands for no checkpoint is meant, such as `LOOKUP`.

    Raises:
        ConfigError: There is a folder of that name, too.
    """
    if drafter != word:
        return False
    if Path(word).is_dir():
        raise ConfigError(
            f"{word!r} means {WORDS[word]}, and is a folder here as well; say ./{word} for the "
            "folder, or go to another one"
        )
    return True


def recognise(drafter: str | Path) -> tuple[Kind, dict[str, Any]]:
    """The kind of a drafter, with its config; reads no weights.

    Raises:
        CheckpointError: Files are missing or damaged, or have the signs of several kinds.
        UnsupportedTargetError: It is a model whose trees would not be exact.
    """
    config = read_config(find_checkpoint(drafter, CONFIG_ONLY))
    folder = Path(drafter).expanduser()
    refused = find_refused(config)
    if refused is not None:
        raise CheckpointError(
            f"{drafter} is a {refused}, which is not supported; use a recurrent drafter, an EAGLE "
            "head, Medusa heads, an MTP module, a SpecFormer or a smaller model of the same tokens"
        )
    # A repository is downloaded once its config says what it is.
    shapes = read_shapes(folder) if folder.is_dir() and has_weights(folder) else {}
    pickles = [path for suffix in PICKLES for path in folder.glob(f"*{suffix}")]
    if folder.is_dir() and not shapes and pickles:
        raise CheckpointError(
            f"expected model*.safetensors in {folder}, found pickled weights; those of drafters "
            "become loadable by `redrafter-mlx convert`"
        )
    kinds = [kind for kind, is_kind in SIGNS.items() if is_kind(config, shapes)]
    if len(kinds) > 1:
        raise CheckpointError(
            f"{drafter} has the signs of several kinds of drafters: {', '.join(kinds)} (model_type "
            f"{config.get('model_type')!r} in config.json, and the tensors of a recurrent drafter);"
            " give a folder with one of them"
        )
    kind = kinds[0] if kinds else "recurrent drafter"
    if kind == "draft model":
        check_config(config)
    return kind, config


def find_refused(config: Mapping[str, Any]) -> str | None:
    """What a config describes, if it is a kind of drafter that is not supported."""
    architectures = config.get("architectures")
    speculator = config.get("speculators_model_type")
    said = [config.get("model_type"), speculator]
    said += architectures if isinstance(architectures, list) else []
    letters = " ".join(re.sub("[^a-z0-9]", "", str(one).lower()) for one in said)
    for sign, kind in REFUSED.items():
        if sign in letters:
            return kind
    if speculator not in (None, "eagle3", "recurrent_drafting"):
        return f"drafter of speculators_model_type {speculator!r}"
    return None

"""What a drafter's name or folder stands for, from its config and the headers of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from mlx_redrafter.checkpoint import find_checkpoint, read_config, read_shapes
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.eagle.published import is_eagle
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE
from mlx_redrafter.target.inspection import check_config

CONFIG_ONLY = ["config.json"]
LOOKUP = "lookup"

Kind = Literal["recurrent drafter", "EAGLE head", "draft model"]
# Formats that are not supported, as configs name them, without signs between the letters.
REFUSED: Mapping[str, str] = {
    "dflash": "DFlash drafter, which drafts blocks from states of many layers",
    "dspark": "DSpark drafter, which drafts blocks",
    "peagle": "P-EAGLE head, which drafts several tokens in parallel",
    "gemma4assistant": "Gemma 4 assistant, which reads the target's own keys and values",
    "mlpspeculator": "MLP speculator",
}


def _is_recurrent(config: Mapping[str, Any], names: Collection[str]) -> bool:
    has_tensors = any(name.startswith(("rnn_u.", "rnn_w.", "lm_head.0.")) for name in names)
    return config.get("model_type") == MODEL_TYPE or has_tensors


def _is_model(config: Mapping[str, Any], names: Collection[str]) -> bool:
    is_other = _is_recurrent(config, ()) or is_eagle(config, names)
    return "model_type" in config and not is_other


# Signs of every kind: config.json, and names of tensors.
SIGNS: Mapping[Kind, Callable[[Mapping[str, Any], Collection[str]], bool]] = {
    "recurrent drafter": _is_recurrent,
    "EAGLE head": is_eagle,
    "draft model": _is_model,
}


def is_lookup(drafter: str | Path | None) -> bool:
    """Whether the word for drafts out of the text is meant.

    Raises:
        ConfigError: There is a folder of that name, too.
    """
    if drafter != LOOKUP:
        return False
    if Path(LOOKUP).is_dir():
        raise ConfigError(
            f"{LOOKUP!r} means drafts out of the text itself, and is a folder here as well; say "
            f"./{LOOKUP} for the folder, or go to another one"
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
            "head or a smaller model of the same tokens"
        )
    # A repository is downloaded once its config says what it is.
    names = read_shapes(folder) if folder.is_dir() and _has_weights(folder) else {}
    if folder.is_dir() and not names and any(folder.glob("*.bin")):
        raise CheckpointError(
            f"expected model*.safetensors in {folder}, found pickled weights; those of drafters "
            "become loadable by `redrafter-mlx convert`"
        )
    kinds = [kind for kind, is_kind in SIGNS.items() if is_kind(config, names)]
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


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors"))

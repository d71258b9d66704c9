"""Families of MTP modules: names of their tensors, and the order of their parts.

    DeepSeek-V3, GLM-4.5, GLM-4.7-Flash  model.layers.{num_hidden_layers}.*, experts one by one
    Qwen3-Next, Qwen3.5                  mtp.*, or no prefix in mlx-vlm's files; norms minus one
    MiMo                                 model.mtp_layers.0.*

Sources: vLLM's ``deepseek_mtp.py``, ``glm4_moe_mtp.py``, ``qwen3_next_mtp.py`` and ``mimo_mtp.py``,
and mlx-vlm's ``qwen3_5_mtp``. ERNIE-4.5 is missing, as its sources contradict one another. In
PaddlePaddle's training code a module reads the state before the model's last norm, and applies
that norm to its output; FastDeploy's ``ernie4_5_mtp.py`` reads the state after that norm; vLLM's
``ernie_mtp.py`` and SGLang's ``ernie4_eagle.py`` do so, too, and apply no norm to the output.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.model_parts import MLX_LM_MODELS

# Ending of the model type of a folder with a module alone; its tensors have no prefix.
SIDECAR = "_mtp"
# Prefixes that no language model's own tensors have.
OWN_PREFIXES = ("mtp.", "model.mtp_layers.")


@dataclass(frozen=True)
class Family:
    """The MTP modules of a family of models.

    Attributes:
        prefix: Beginning of the names of the first module's tensors, with ``{layer}`` for the
            number of the model's layers.
        names: Beginnings of the names after that, with the names of `Mtp` that replace them; other
            tensors belong to the decoder layer.
        left_out: Beginnings of the names of tensors that are the target's own.
        layer: Keys of the config that make the decoder layer of a model of one layer that of the
            module.
        hidden_first: Whether the joined row begins with the state, and not with the embedding.
        feeds_norm: Whether the output after the last norm replaces the target's state.
        norm_offset: Number to add to the published weights of norms.
    """

    prefix: str
    names: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    layer: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    feeds_norm: bool = True
    norm_offset: float = 0.0


DEEPSEEK = Family(
    prefix="model.layers.{layer}.",
    names={
        "enorm.": "embedding_norm.",
        "hnorm.": "hidden_norm.",
        "eh_proj.": "join.",
        "shared_head.norm.": "norm.",
    },
    left_out=("embed_tokens.", "shared_head.head."),
    layer={"first_k_dense_replace": 0},
    feeds_norm=False,
)
QWEN = Family(
    prefix="mtp.",
    names={
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "fc.": "join.",
        "norm.": "norm.",
        "layers.0.": "block.",
    },
    layer={"full_attention_interval": 1},
    norm_offset=1.0,
)
MIMO = Family(
    prefix="model.mtp_layers.0.",
    names={
        "token_layernorm.": "embedding_norm.",
        "hidden_layernorm.": "hidden_norm.",
        "input_proj.": "join.",
        "final_layernorm.": "norm.",
    },
    hidden_first=True,
)
FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
}


def model_type_of(values: Mapping[str, Any]) -> str:
    """Return the type of the model that a ``config.json``, or its sidecar, describes."""
    if not has_family(values):
        raise ConfigError(
            f"expected a model with an MTP module, of type {', '.join(FAMILIES)}, found "
            f"{values.get('model_type')!r}; use a drafter or lookup"
        )
    return str(values["model_type"]).removesuffix(SIDECAR)


def has_family(values: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a model with an MTP module, or of the module alone."""
    return str(values.get("model_type")).removesuffix(SIDECAR) in FAMILIES


def is_sidecar(values: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a folder with a module alone."""
    return has_family(values) and str(values["model_type"]).endswith(SIDECAR)


def prefix_of(values: Mapping[str, Any]) -> str:
    """Return the beginning of the names of the tensors of a model's first module."""
    if is_sidecar(values):
        return ""
    prefix = FAMILIES[model_type_of(values)].prefix
    return prefix.format(layer=text_values(values).get("num_hidden_layers"))


def is_mtp(values: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a folder has the tensors of MTP modules and none of a model's."""
    if is_sidecar(values):
        return True
    known = str(values.get("model_type")) in FAMILIES
    prefixes = (*OWN_PREFIXES, prefix_of(values)) if known else OWN_PREFIXES
    of_module = [name.startswith(prefixes) for name in names]
    return bool(of_module) and all(of_module)


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model in a ``config.json``."""
    nested = values.get("text_config")
    return nested if isinstance(nested, Mapping) else values


def one_layer_model(values: Mapping[str, Any]) -> nn.Module:
    """Make a model of mlx-lm with the one layer of a module; MLX computes no random weights."""
    model_type = model_type_of(values)
    module = importlib.import_module(MLX_LM_MODELS + model_type)
    changed = {"model_type": model_type, "num_hidden_layers": 1, **FAMILIES[model_type].layer}
    arguments = {**copy.deepcopy(dict(text_values(values))), **changed}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments))
    return model


def published_name(own: str, family: Family, prefix: str) -> str:
    """Return the name that a tensor of `Mtp` has in a checkpoint."""
    for published, name in family.names.items():
        if own.startswith(name):
            return prefix + published + own.removeprefix(name)
    return prefix + own.removeprefix("block.")

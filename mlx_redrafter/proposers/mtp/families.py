"""Families of MTP modules: names of their tensors, and the order of their parts.

    DeepSeek-V3, GLM-4.5, GLM-4.7-Flash  model.layers.{num_hidden_layers}.*, experts one by one
    Qwen3-Next, Qwen3.5                  mtp.*, or no prefix in mlx-vlm's files; norms minus one
    MiMo                                 model.mtp_layers.0.*
    Nemotron-H                           mtp.layers.{i}.*, attention and experts as layers

Sources: vLLM's ``deepseek_mtp.py``, ``glm4_moe_mtp.py``, ``qwen3_next_mtp.py``, ``mimo_mtp.py`` and
``nemotron_h_mtp.py``. mlx-vlm's ``qwen3_5_mtp``, ``glm4_moe_lite_mtp`` and ``nemotron_h_mtp`` have
the splitters that write folders with a module alone.

ERNIE-4.5 is missing, as PaddlePaddle's training code, FastDeploy and vLLM contradict one another
in where the model's last norm applies.
"""

import copy
import importlib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.kind import Shapes, text_values
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
        names: Beginnings of the names after that, with the names of `Mtp` that replace them, and
            ``{last}`` for the module's last layer; other tensors belong to the decoder layer.
        left_out: Beginnings of the names of tensors that are the target's own.
        sidecar: Beginnings of names in folders with a module alone, if they are others there, with
            those of a model's files.
        base: Beginning of the names of these layers in a model of mlx-lm.
        layers: Function from a model's config to the keys that give a model of mlx-lm the
            module's layers alone.
        hidden_first: Whether the joined row begins with the state, and not with the embedding.
        feeds_norm: Whether the output after the last norm replaces the target's state.
        norm_offset: Number to add to the published weights of norms.
    """

    prefix: str
    names: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    sidecar: Mapping[str, str] = field(default_factory=dict)
    base: str = "model.layers.0."
    layers: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}
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
    sidecar={
        "model.mtp_block.": "",
        "model.shared_head_norm.": "shared_head.norm.",
        "lm_head.": "shared_head.head.",
        "model.": "",
    },
    layers=lambda values: {"first_k_dense_replace": 0},
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
    layers=lambda values: {"full_attention_interval": 1},
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
# Layers that Nemotron-H's modules have, by their codes in configs: attention, experts, an MLP.
NEMOTRON_LAYERS = {"attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


def _nemotron_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    pattern: Any = values.get("mtp_hybrid_override_pattern")
    if pattern is None:
        names: Any = values.get("mtp_layers_block_type")
        is_list = isinstance(names, list)
        pattern = [NEMOTRON_LAYERS.get(str(one), "?") for one in names] if is_list else "?"
    if not isinstance(pattern, (str, list)) or "*" not in pattern or not set(pattern) <= set("*E-"):
        raise ConfigError(
            "expected mtp_hybrid_override_pattern of attention (*), experts (E) and MLPs (-), "
            f"found {reprlib.repr(values.get('mtp_hybrid_override_pattern'))}"
        )
    codes = list(pattern)
    return {"hybrid_override_pattern": codes, "layers_block_type": None, "layer_types": None}


NEMOTRON = Family(
    prefix="mtp.",
    names={
        "layers.0.enorm.": "embedding_norm.",
        "layers.0.hnorm.": "hidden_norm.",
        "layers.0.eh_proj.": "join.",
        "layers.{last}.final_layernorm.": "norm.",
        "layers.": "block.layers.",
    },
    base="backbone.",
    layers=_nemotron_layers,
)
FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
    "nemotron_h": NEMOTRON,
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


def is_mtp(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Return whether a folder has the tensors of MTP modules and none of a model's."""
    if is_sidecar(config):
        return True
    known = str(config.get("model_type")) in FAMILIES
    prefixes = (*OWN_PREFIXES, prefix_of(config)) if known else OWN_PREFIXES
    of_module = [name.startswith(prefixes) for name in shapes]
    return bool(of_module) and all(of_module)


def model_of_layers(values: Mapping[str, Any]) -> nn.Module:
    """Make a model of mlx-lm with a module's layers alone; MLX computes no random weights."""
    model_type, text = model_type_of(values), text_values(values)
    module = importlib.import_module(MLX_LM_MODELS + model_type)
    changed = {"model_type": model_type, "num_hidden_layers": 1}
    changed |= FAMILIES[model_type].layers(text)
    return module.Model(module.ModelArgs.from_dict({**copy.deepcopy(dict(text)), **changed}))


def published_name(own: str, names: Mapping[str, str], prefix: str) -> str:
    """Return the name that a tensor of `Mtp` has in a checkpoint."""
    for published, name in names.items():
        if own.startswith(name):
            return prefix + published + own.removeprefix(name)
    return prefix + own.removeprefix("block.")

"""EAGLE heads as others publish them: their configs and the names of their tensors.

    SafeAILab EAGLE-1     fc, layers.0.*, embed_tokens
    SafeAILab EAGLE-3     fc, midlayer.*, norm, lm_head, d2t, t2d
    speculators EAGLE-3   fc, layers.{i}.*, norm, lm_head, d2t, t2d, embed_tokens, verifier_*
    NVIDIA EAGLE-3        as SafeAILab's; input_norm, or no fc, by the object eagle_config

Their config.json often has no other keys than a language model's, so names of tensors decide.

Layer ids are inputs of layers (HF's ``hidden_states[i]``), except those of SpecForge, which are in
``eagle_config`` and begin with 1: the outputs of these layers. SGLang decides so, too (its pull
request 25454). The self-test of `convert` measures both.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

from mlx_redrafter.checks import as_mapping
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.checkpoint import OFFSETS, collect_sources, speculative_tokens
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE, EagleConfig
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.layer_sizes import LayerSizes

CAPTURED = "eagle_aux_hidden_state_layer_ids"
# Tensors that are not read: the target's own, and a mask that only training needs.
LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Projections of which the first layer of a head has one: full attention, and latent attention.
FIRST = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
# Keys that the config here has under the same name.
SAME_KEYS = (
    *(field.name for field in fields(LayerSizes)),
    "num_hidden_layers",
    "attention_bias",
    "mlp_bias",
)
# Keys of variants of the network, likewise.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Key of the object of NVIDIA's and SpecForge's configs that describes the head.
NESTED = "eagle_config"


def is_eagle(config: Mapping[str, Any], shapes: Shapes) -> bool:
    speculators = config.get("speculators_model_type")
    if config.get("model_type") == MODEL_TYPE or speculators in ("eagle3", "peagle"):
        return True
    if shapes:
        own = set(map(_own_name, shapes))
        has_norm = "layers.0.input_layernorm.weight" in own
        has_layer = not own.isdisjoint(f"layers.0.self_attn.{name}.weight" for name in FIRST)
        is_third = "layers.0.hidden_norm.weight" in own
        return has_layer and (is_third or ("fc.weight" in own and not has_norm))
    return "eagle3" in str(config.get("architectures")).lower() or (
        "draft_vocab_size" in config and config.get("model_type") == "llama"
    )


def read_published(values: Mapping[str, Any], stored: Shapes) -> tuple[EagleConfig, dict[str, str]]:
    """Read a config of this package, or as published, given the shapes of the tensors.

    Also map names of `Eagle` to the published ones, without those that are not read.
    """
    names = collect_sources(stored, _own_name)[0]
    if not _has_embedding(values):
        names.pop("embed_tokens.weight", None)  # the target's
    return _read_config(values, {own: stored[name] for own, name in names.items()}), names


def _read_config(values: Mapping[str, Any], shapes: Shapes) -> EagleConfig:
    if values.get("model_type") == MODEL_TYPE:
        return EagleConfig.from_dict(values)
    nested = values.get("transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else values
    _check_variant(values, layer, shapes)
    is_third = "layers.0.hidden_norm.weight" in shapes
    has_fc = not is_third or "fc.weight" in shapes
    config = {key: layer[key] for key in SAME_KEYS if layer.get(key) is not None}
    config.setdefault("num_key_value_heads", layer.get("num_attention_heads"))
    rows, kinds = shapes.get("token_ids"), layer.get("layer_types")
    slides = "sliding_attention" in str(kinds)
    found = {**as_mapping(values.get(NESTED)), **values}
    return EagleConfig.from_dict(
        {
            **config,
            **rope_of(layer),
            "version": 3 if is_third else 1,
            "draft_vocab_size": rows[0] if rows else None,
            "layer_type": "qwen3" if "layers.0.self_attn.q_norm.weight" in shapes else "llama",
            "fc_bias": False if is_third else values.get("bias", True),
            "captured_layers": _captured(values) if is_third and has_fc else None,
            "reads_hidden_state": not has_fc,
            "own_embedding": _has_embedding(values),
            **_mask(values),
            # A window that no layer uses is left out.
            "layer_types": kinds if slides else None,
            "sliding_window": layer.get("sliding_window") if slides else None,
            **{key: found[key] for key in VARIANTS if key in found},
        }
    )


def rope_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Read base and scaling of the rotary embedding, which newer configs have in one object."""
    joined = as_mapping(layer.get("rope_parameters"))
    scaling = layer.get("rope_scaling")
    if scaling is None and joined.get("rope_type", "default") != "default":
        scaling = joined
    theta = layer.get("rope_theta", joined.get("rope_theta"))
    return {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})


def _own_name(name: str) -> str | None:
    """Return the name of `Eagle`; None for a tensor that is not read."""
    own = re.sub("^midlayer[.]", "layers.0.", name.removeprefix("model."))
    if own in LEFT_OUT or own.endswith("rotary_emb.inv_freq"):
        return None
    return "token_ids" if own == OFFSETS else own


def _captured(values: Mapping[str, Any]) -> Any:
    """Return the layers whose inputs the head reads, as the file has them if they are damaged."""
    given = values.get(CAPTURED)
    if given is not None:
        return given
    given = as_mapping(values.get(NESTED)).get(CAPTURED)
    if isinstance(given, list) and given[:1] == [1] and all(type(one) is int for one in given):
        return [one + 1 for one in given]
    return given


def _has_embedding(values: Mapping[str, Any]) -> bool:
    return values.get("embed_requires_grad", values.get("own_embedding")) is True


def _mask(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a P-EAGLE head; none for others."""
    if values.get("speculators_model_type") != "peagle":
        return {}
    if values.get("mask_token_id") is None:
        raise CheckpointError(
            "expected mask_token_id in the config.json of this P-EAGLE head, found none; download "
            "it again"
        )
    found = speculative_tokens(values)
    depths = found if type(found) is int and found > 0 else 8  # as in training
    max_length = min(1 + depths, MAX_BEAM_LENGTH)
    return {"mask_token_id": values["mask_token_id"], "max_length": max_length}


def _check_variant(
    values: Mapping[str, Any], layer: Mapping[str, Any], names: Container[str]
) -> None:
    found, has_fc = None, "fc.weight" in names
    use_aux = as_mapping(values.get(NESTED)).get("use_aux_hidden_state", True)
    if "layers.0.hidden_norm.weight" in names and has_fc is not bool(use_aux):
        which = "the" if has_fc else "no"
        found = f"use_aux_hidden_state {use_aux!r}, but {which} tensor fc.weight"
    elif "mask_hidden" in names and values.get("speculators_model_type") != "peagle":
        found = "the tensor mask_hidden of P-EAGLE, but a config that is not speculators' 'peagle'"
    elif "layers.0.self_attn.kv_a_proj_with_mqa.weight" in names:
        found = "layers with latent attention (kv_a_proj_with_mqa)"
    elif "layers.0.mlp.router.weight" in names or "layers.0.mlp.gate.weight" in names:
        found = "a mixture of experts in its layer"
    elif layer.get("hidden_act", "silu") != "silu":
        found = f"hidden_act {layer['hidden_act']!r}, not 'silu'"
    elif values.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        found = f"target_hidden_size {values['target_hidden_size']!r}, not its own hidden_size"
    if found is not None:
        raise CheckpointError(
            f"this EAGLE head has {found}, which is not supported; use another head"
        )

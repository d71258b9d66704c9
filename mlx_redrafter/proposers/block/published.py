"""Block drafters as others publish them: their configs and the names of their tensors.

    z-lab, incoai    DFlashDraftModel, DFlash2DraftModel, values in ``dflash_config``
    DeepSpec         Qwen3DSparkModel, Gemma4DSparkModel, all values at the top
    SpecForge        ``dflash_config`` with projector_type "dspark"
    LFM2.5           Lfm2DSparkDraftModel, values in ``dflash_config``
    Qwen3.5          Qwen35DSparkModel: gated attention, norms stored less one
    Meta             muse_glimmer_assistant, all values at the top, tensors ``encoder.*``
    speculators      ``transformer_layer_config`` and ``speculators_model_type``

Their config.json is often a copy of the target's. So the shapes of the tensors decide all sizes,
the link and the variant of the layers. The config decides only layers that are read, slots, masks,
rotary embedding and scales.
"""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_redrafter.checks import as_mapping, is_number
from mlx_redrafter.device_read import to_floats
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block.config import MODEL_TYPE, BlockConfig
from mlx_redrafter.proposers.block.values import (
    ASSISTANT,
    LIKE_ZLAB,
    PublishedValues,
    first_slot_of,
    masks_of,
)
from mlx_redrafter.proposers.checkpoint import OFFSETS, collect_sources
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION, reading

ATTENTION = "layers.0.self_attn."
# Tensors that are not read: the target's own, and what only training needs.
LEFT_OUT = re.compile(r"t2d$|verifier_|.*rotary_emb\.inv_freq$")
# Names of one runtime for tensors that all others name otherwise.
ALIASES = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
# Tensors of variants that are not supported, and what they are.
UNSUPPORTED = {
    "layers.0.self_attn.qkv_proj.weight": "a joint projection of queries, keys and values",
    "layers.0.self_attn.g_proj.weight": "an attention with g_proj",
    "aux_hidden_norms.0.weight": "a norm for each layer that it reads",
    "log_snr_embed.weight": "an embedding of noise levels",
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": "latent attention",
    "layers.0.mlp.gate.weight": "a mixture of experts",
    "mask_embedding.weight": "an embedding of its own for masks",
}
# Names in configs of the links that are Markov heads.
MARKOV_HEADS = {"vanilla": "vanilla", "gated": "gated", "recurrent": "rnn"}
# Norms whose mean is below this are stored less one: they start at one, or at zero.
STORED_LESS_ONE = 0.5


def is_block_drafter(config: Mapping[str, Any], shapes: Shapes) -> bool:
    if config.get("model_type") == MODEL_TYPE:
        return True
    names = {_own_name(name) for name in shapes}
    # An EAGLE-3 head has a `hidden_norm` as well, but inside its first layer.
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return True
    if str(config.get("model_type")).endswith(ASSISTANT):
        return "target_layer_ids" in config
    said = f"{config.get('speculators_model_type')} {config.get('architectures')}".lower()
    return "dflash" in said or "dspark" in said


def read_published(values: Mapping[str, Any], stored: Shapes) -> tuple[BlockConfig, dict[str, str]]:
    """Read a config of this package, or as published, given the shapes of the tensors.

    Also map names of `BlockNetwork` to the published ones, without those that are not read.
    """
    names = collect_sources(stored, _own_name)[0]
    config = _read_config(values, {own: stored[name] for own, name in names.items()})
    if config.draft_vocab_size is None:
        names.pop("token_ids", None)  # a table of the whole vocabulary
    return config, names


def _read_config(values: Mapping[str, Any], shapes: Shapes) -> BlockConfig:
    if values.get("model_type") == MODEL_TYPE:
        return BlockConfig.from_dict(values)
    config = PublishedValues.of(values)
    _check_variant(config, shapes)
    sizes = _Sizes(shapes, config)
    fields = {**sizes.layers(), **sizes.link(config)}
    _check_stated(config, fields)
    with reading("the block drafter's config.json is"):
        return BlockConfig(
            **fields,
            **_taps(config, sizes),
            **_scales(config, sizes),
            **masks_of(config),
            **_rope(config, sizes),
            **_block(config, sizes),
        )


def packaging_of(values: Mapping[str, Any]) -> str:
    if values.get("model_type") == MODEL_TYPE:
        return "written by this package"
    return f"as {PublishedValues.of(values).packaging} writes it"


def resolve_stored(weights: dict[str, mx.array], values: Mapping[str, Any]) -> None:
    """Replace, in place, norms that are stored less one by factors; blocks until MLX reads one."""
    if values.get("model_type") == MODEL_TYPE:
        return
    (mean,) = to_floats(mx.mean(weights["hidden_norm.weight"].astype(mx.float32))[None])
    config = PublishedValues.of(values)
    is_less_one = config.backbone == "qwen3_5" or config.flag("use_gemma_norm") is True
    if (mean < STORED_LESS_ONE) != is_less_one:
        found, expected = ("as factors", "less one") if is_less_one else ("less one", "as factors")
        raise CheckpointError(
            f"expected norms that are stored {expected}, as its config.json says, found a "
            f"hidden_norm with mean {mean:.2f}, as if stored {found}; use a head whose files agree"
        )
    if is_less_one:
        for own in weights:
            if own.endswith("norm.weight"):
                weights[own] = weights[own] + 1


class _Sizes:
    """Sizes of a drafter from the shapes of its tensors, quantised or not."""

    def __init__(self, shapes: Shapes, config: PublishedValues):
        self.shapes = shapes
        found = as_mapping(config.values.get("quantization")).get("group_size")
        self.group_size = found if isinstance(found, int) else 1
        self.hidden = self.axis("hidden_norm.weight", 0)
        self.head = self.axis(ATTENTION + "k_norm.weight", 0)
        self.vocab = config.integer("vocab_size", MAX_DIMENSION, in_layer=True)
        self.num_layers = config.integer("num_hidden_layers", MAX_COUNT, in_layer=True)

    def axis(self, name: str, axis: int) -> int:
        """Return a dimension of a tensor, of the numbers that it stands for."""
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"expected a tensor {name} in this block drafter, found none; download it again, "
                "or use another head"
            )
        scales = self.shapes.get(name.removesuffix("weight") + "scales")
        if axis == 1 and scales is not None and len(scales) == 2:
            return scales[1] * self.group_size
        if len(shape) <= axis or shape[axis] < 1:
            raise CheckpointError(
                f"expected at least {axis + 1} dimensions of 1 or more in {name}, found "
                f"{list(shape)}; download it again, or use another head"
            )
        return shape[axis]

    @property
    def is_gated(self) -> bool:
        width = self.axis(ATTENTION + "q_proj.weight", 0)
        return width == 2 * self.axis(ATTENTION + "o_proj.weight", 1)

    @property
    def is_sandwich(self) -> bool:
        return "layers.0.pre_feedforward_layernorm.weight" in self.shapes

    def layers(self) -> dict[str, Any]:
        num_heads = self.axis(ATTENTION + "o_proj.weight", 1) // self.head
        names = ("token_ids", "lm_head.weight")
        rows = next((self.axis(name, 0) for name in names if name in self.shapes), self.vocab)
        is_reduced = rows != self.vocab
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.axis("layers.0.mlp.gate_proj.weight", 0),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.axis(ATTENTION + "k_proj.weight", 0) // self.head,
            "head_dim": self.head,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.num_layers,
            "draft_vocab_size": rows if is_reduced else None,
            "has_embedding": "embed_tokens.weight" in self.shapes,
            "has_head": is_reduced or "lm_head.weight" in self.shapes,
            "layer_type": "gemma4" if self.is_sandwich else "qwen3",
            "attention_bias": ATTENTION + "q_proj.bias" in self.shapes,
            "is_gated": self.is_gated,
            "has_values": ATTENTION + "v_proj.weight" in self.shapes,
            "has_sinks": ATTENTION + "attention_sink_bias" in self.shapes,
        }

    def link(self, config: PublishedValues) -> dict[str, Any]:
        fields: dict[str, Any] = {"link": "none"}
        if "markov_head.markov_w1.weight" in self.shapes:
            rank = self.axis("markov_head.markov_w1.weight", 1)
            kinds = {"gate_proj": "gated", "joint_proj": "recurrent"}
            found = [k for name, k in kinds.items() if f"markov_head.{name}.weight" in self.shapes]
            fields = {"link": found[0] if found else "vanilla", "rank": rank}
        elif "candidate_selector.predecessor_codebook" in self.shapes:
            rank = self.axis("candidate_selector.predecessor_codebook", 1)
            count = config.integer("selector_top_k", MAX_DIMENSION, 16)
            fields = {"link": "selector", "rank": rank, "num_candidates": count}
        kernel = "layers.0.attention_conv.base_kernel"
        if kernel in self.shapes:
            taps = self.axis(kernel, 1)
            projected = self.axis("layers.0.attention_conv.kernel_projection.weight", 0)
            fields |= {"conv_taps": taps, "conv_groups": projected // (2 * taps)}
        confidence = "confidence_head.proj.weight"
        if confidence in self.shapes:
            reads = self.axis(confidence, 1) > self.hidden
            fields |= {"has_confidence": True, "confidence_reads_token": reads}
        return fields


def _own_name(name: str) -> str | None:
    """Return the name of `BlockNetwork`; None for a tensor that is not read."""
    own = name.removeprefix("model.")
    stem, _, leaf = own.rpartition(".")
    own = f"{ALIASES.get(stem, stem)}.{leaf}" if stem else leaf
    if LEFT_OUT.match(own):
        return None
    if own == OFFSETS:
        return "token_ids"
    return own.removesuffix(".weight") if own.endswith("_codebook.weight") else own


def _check_variant(config: PublishedValues, shapes: Shapes) -> None:
    found = next((kind for name, kind in UNSUPPORTED.items() if name in shapes), None)
    projector = config.find("projector_type")
    # Gemma's configs name the activation otherwise.
    has_gelu = "gelu" in str(config.find("hidden_activation"))
    if config.find("log_snr_conditioning"):
        found = "an embedding of noise levels (log_snr_conditioning)"
    elif config.flag("use_aux_hidden_state") is False:
        found = "no states of the target's layers (use_aux_hidden_state)"
    elif projector not in (None, "dflash", "dspark"):
        found = f"projector_type {projector!r}"
    elif config.find("hidden_act", "silu") != "silu" and not has_gelu:
        found = f"hidden_act {config.find('hidden_act')!r}, not 'silu'"
    if found is not None:
        raise CheckpointError(
            f"this block drafter has {found}, which is not supported; use another head"
        )


def _check_stated(config: PublishedValues, fields: Mapping[str, Any]) -> None:
    link, rank = fields["link"], fields.get("rank", 0)
    is_markov = link in MARKOV_HEADS
    found = {
        "markov_rank": rank if is_markov else 0,
        "markov_head_type": MARKOV_HEADS.get(link),
        "projector_type": "dspark" if is_markov else "dflash",
        "selector_rank": rank if link == "selector" else 0,
        "conv_kernel_size": fields.get("conv_taps", 0),
        "draft_vocab_size": fields["draft_vocab_size"],
    }
    for key, own in found.items():
        stated = config.find(key, own)
        if own is not None and stated != own:
            raise CheckpointError(
                f"config.json says {key} {stated!r}, but the drafter's tensors are those of "
                f"{own!r}; download it again, or use a head whose files agree"
            )


def _taps(config: PublishedValues, sizes: _Sizes) -> dict[str, Any]:
    """Read the target's layers by the number of the one whose input it is.

    speculators counts as Hugging Face's ``hidden_states`` do, the embedding first, so that its
    numbers are those of inputs. Others number the layer whose output is read, -1 for the embedding.
    """
    is_input = config.packaging == "speculators"
    key = "aux_hidden_state_layer_ids" if is_input else "target_layer_ids"
    ids = config.find(key)
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"expected {key}, a list of layers to read, in the block drafter's config.json, found "
            f"{ids!r}; use a head whose config names them"
        )
    joined = sizes.axis("fc.weight", 1) // sizes.hidden
    if joined != len(ids):
        raise CheckpointError(
            f"fc.weight reads {joined} layers of the target, but {key} in config.json names "
            f"{len(ids)}; use a head whose files agree"
        )
    return {
        "captured_layers": tuple(i + (not is_input) for i in ids),
        # In a config of speculators it would be a copy of some other number.
        "num_target_layers": None if is_input else config.find("num_target_layers"),
    }


def _block(config: PublishedValues, sizes: _Sizes) -> dict[str, Any]:
    size, slot = config.integer("block_size", MAX_DIMENSION), first_slot_of(config)
    is_dspark = "markov_head.markov_w1.weight" in sizes.shapes
    counts_drafts = config.packaging != "speculators" and not config.flag("dspark_bonus_anchor")
    if slot and is_dspark and counts_drafts:
        size += 1  # DeepSpec counts drafts, others count entries
    mask = config.integer("mask_token_id", MAX_DIMENSION)
    return {"block_size": size, "first_slot": slot, "mask_token_id": mask}


def _scales(config: PublishedValues, sizes: _Sizes) -> dict[str, Any]:
    scale = config.number("input_embedding_scale", 1.0)
    if sizes.is_sandwich and "embed_tokens.weight" in sizes.shapes:
        scale *= sizes.hidden**0.5
    return {
        "embed_scale": scale,
        "skips_embedding_norm": config.packaging in LIKE_ZLAB,
        "output_multiplier": config.number("output_multiplier", 1.0),
        "softcap": config.number("final_logit_softcapping", 0.0) or None,
        "value_scale": config.number("attention_value_scale", 1.0),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
    }


def _rope(config: PublishedValues, sizes: _Sizes) -> dict[str, Any]:
    """Read the rotary embedding; of gated heads alone, a part of each head may be rotated."""
    layer = config.layer
    rope: Any = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"expected an object as rope_parameters, found {rope!r}")
    if isinstance(rope.get("full_attention"), Mapping):  # one for each type of layer
        kind = (config.find("layer_types") or ["full_attention"])[0]
        rope = rope[kind] if isinstance(rope.get(kind), Mapping) else rope["full_attention"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    # If there are two bases, transformers takes the inner one.
    theta = rope.get("rope_theta", layer.get("rope_theta", 10000.0))
    part = rope.get("partial_rotary_factor", 1.0)
    is_partial = config.backbone == "qwen3_5" or sizes.is_gated
    share = part if is_partial and is_number(part) and 0 < part < 1 else 1.0
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind in ("default", None) else dict(rope),
        "rope_dims": rope.get("rope_dim", int(sizes.head * share)),
        "rope_traditional": config.flag("rope_is_neox_style") is False,
        "max_position_embeddings": layer.get("max_position_embeddings", 32768),
    }

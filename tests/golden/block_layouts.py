"""Block drafters with the published names and config keys, with random weights; numpy only.

`record_block.py` gives them to the reference packages, and the tests to this package.

Axes: H hidden size, V vocabulary, S captured layers, r rank of a link.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.helpers.published_heads import Shapes, layer_shapes, seeded

Floats = NDArray[np.float32]
Config = dict[str, Any]

HIDDEN, WIDTH, HEADS, GROUPS, HEAD_SIZE, VOCAB, REDUCED, RANK = 32, 48, 4, 2, 8, 48, 20, 8
LAYERS, NUM_TARGET_LAYERS, TAPPED, WINDOW, GROUPS_OF_KERNELS, TAPS = 2, 4, 2, 9, 4, 3
# Numbers of verified tokens after which a block is compared. Three lie beyond the window.
LENGTHS = (1, 6, 13, 21)
# Tokens of the drafts along which linked logits are compared.
CHAIN = (7, 3, 11, 3, 19, 2, 5, 13)
# Token id of the root.
ROOT = 17
# The four reference packages, on the package index.
ZLAB, DSPARK, VLM, SPECULATORS = "dflash", "mlx-dspark", "mlx-vlm", "speculators"


class Layout(NamedTuple):
    """A drafter as published, and the packages that read it, the one to follow first."""

    config: Config
    shapes: Shapes
    references: tuple[str, ...]


LAYER: Config = {
    "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": HEAD_SIZE, "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "hidden_act": "silu", "model_type": "qwen3",
    "attention_bias": False,
}  # fmt: skip
YARN: Config = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 8,
}  # fmt: skip
SLIDING = ["sliding_attention"] * LAYERS
MIXED = ["full_attention", "sliding_attention"]
BOUNDED: Config = {"layer_types": SLIDING, "sliding_window": WINDOW}
SLIDING_LAYERS: Config = {**BOUNDED, "use_sliding_window": True}
MIXED_LAYERS: Config = {**SLIDING_LAYERS, "layer_types": MIXED}


def per_layer(shapes: Shapes) -> Shapes:
    """Return the shapes of one layer's tensors for every layer."""
    return {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}


def backbone() -> Shapes:
    """Return the shapes of Qwen 3's decoder layers and of what reads the target."""
    return {
        "fc.weight": (HIDDEN, TAPPED * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        **layer_shapes(LAYER, HIDDEN),
    }


def selector() -> Shapes:
    """Return the shapes of DFlash 2's selector and convolutions."""
    kernels = {"base_kernel": (2, TAPS, HIDDEN)}
    kernels["kernel_projection.weight"] = (2 * TAPS * GROUPS_OF_KERNELS, HIDDEN)
    convolutions = {
        f"{part}_conv.{name}": shape
        for part in ("attention", "mlp")
        for name, shape in kernels.items()
    }
    return {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
        **per_layer(convolutions),
    }


def markov(kind: str = "vanilla", rows: int = VOCAB) -> Shapes:
    """Return the shapes of DSpark's Markov head and confidence head."""
    shapes: Shapes = {
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (rows, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, HIDDEN + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + HIDDEN)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return shapes


OWN = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
MARKOV_KEYS: Config = {
    "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
NUM_LAYERS: Config = {"num_target_layers": NUM_TARGET_LAYERS}
DSPARK_KEYS: Config = {"block_size": 5, "mask_token_id": 47, **MARKOV_KEYS, **NUM_LAYERS}


def layout(config: Config, *references: str, more: Shapes | None = None) -> Layout:
    """Return a layout of the backbone and more; tensors without axes are left out."""
    shapes = {**backbone(), **(more or {})}
    return Layout(config, {name: shape for name, shape in shapes.items() if shape}, references)


def zlab(
    architecture: str = "DFlashDraftModel", nested: Config | None = None, **top: Any
) -> Config:
    """Return the config of a DFlash drafter of z-lab, or of incoai."""
    own = {"target_layer_ids": [0, 2], "mask_token_id": 47, "block_size": 6, **(nested or {})}
    return {**LAYER, "architectures": [architecture], "dflash_config": own, **NUM_LAYERS, **top}


def deepspec(more: Shapes, architecture: str = "Qwen3DSparkModel", **top: Any) -> Layout:
    """Return the layout of a DSpark drafter of DeepSpec."""
    own = {"architectures": [architecture], "target_layer_ids": [0, 2]}
    return layout({**LAYER, **DSPARK_KEYS, **own, **top}, DSPARK, more=more)


def speculators(
    method: str, layer: Config | None = None, more: Shapes | None = None, **top: Any
) -> Layout:
    """Return the layout of a drafter of speculators."""
    names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
    verifier = {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    about = {"algorithm": method, "default_proposal_method": "greedy"}
    config: Config = {
        "architectures": [f"{names[method]}DraftModel"], "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {**about, "proposal_methods": [proposal], "verifier": verifier},
        "transformer_layer_config": {**LAYER, **(layer or {})}, "draft_vocab_size": VOCAB,
        "block_size": 6, "mask_token_id": 47, "aux_hidden_state_layer_ids": [1, 4], **top,
    }  # fmt: skip
    return layout(config, SPECULATORS, more=more)


META_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
REDUCED_HEAD = {"lm_head.weight": (REDUCED, HIDDEN), "d2t": (REDUCED,), "t2d": (VOCAB,)}
SELECTOR_KEYS: Config = {
    "conv_kernel_size": TAPS, "conv_group_size": HIDDEN // GROUPS_OF_KERNELS,
    "selector_rank": RANK, "selector_top_k": 16,
}  # fmt: skip
LFM: Config = {
    **LAYER, "architectures": ["Lfm2DSparkDraftModel"], "block_size": 5, **MARKOV_KEYS,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 47, **NUM_LAYERS},
    "layer_types": ["full_attention"] * LAYERS, "rope_is_neox_style": False,
}  # fmt: skip
SPECFORGE_CONFIG: Config = {
    **zlab(nested={"projector_type": "dspark"}),
    **{"block_size": 5, **MARKOV_KEYS, **NUM_LAYERS},
}
SPECFORGE_CONFIG["dflash_config"].pop("block_size")


# The Qwen 3.5 fork, whose queries have gates.
GATED = per_layer({"self_attn.q_proj.weight": (2 * HEADS * HEAD_SIZE, HIDDEN)})
# DeepSpec's Gemma 4, whose values are its keys before their norm.
GEMMA = per_layer({
    "self_attn.k_proj.weight": (HEAD_SIZE, HIDDEN), "self_attn.v_proj.weight": (),
    "pre_feedforward_layernorm.weight": (HIDDEN,), "layer_scalar": (1,),
    "post_feedforward_layernorm.weight": (HIDDEN,),
})  # fmt: skip
GEMMA_KEYS: Config = {
    "hidden_activation": "gelu_pytorch_tanh", "global_head_dim": HEAD_SIZE,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0,
    "rope_parameters": {"full_attention": {"rope_type": "proportional",
        "partial_rotary_factor": 0.5, "rope_theta": 1000.0}},
}  # fmt: skip
# NVIDIA's Nemotron drafter, which has the target's head and sinks.
SINKS = {
    "embed_tokens.weight": (VOCAB, HIDDEN),
    **per_layer({"self_attn.attention_sink_bias": (HEADS,)}),
}
NVIDIA_KEYS: Config = {
    **BOUNDED, "attention_sink_bias": True, "dflash_query_causal": True,
    "sample_from_anchor": False, "dspark_bonus_anchor": True, "has_lm_head": False,
}  # fmt: skip
QWEN_KEYS: Config = {
    "model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0},
}  # fmt: skip
META: Config = {
    **LAYER, "model_type": "muse_glimmer_assistant",
    "architectures": ["MuseGlimmerAssistantForCausalLM"], **BOUNDED, "block_size": 6,
    "mask_token_id": 47, "target_layer_ids": [0, 2], **NUM_LAYERS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
SCALES: Config = {
    "input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0,
}  # fmt: skip


def of_speculators(kind: str) -> Layout:
    """Return the layout of a DSpark drafter of speculators with a Markov head of this kind."""
    is_reduced = kind == "gated"
    rows = REDUCED if is_reduced else VOCAB
    keys = {**MARKOV_KEYS, "markov_head_type": kind, "sample_from_anchor": not is_reduced}
    more = {**markov(kind, rows), **(REDUCED_HEAD if is_reduced else {})}
    return speculators("dspark", more=more, draft_vocab_size=rows, **keys)


WITH_HEAD = {**markov(), **OWN}
DFLASH_2 = "DFlash2DraftModel"
# The first draft is that of the slot after the root.
AFTER: Config = {"sample_from_anchor": False}
LAYOUTS: dict[str, Layout] = {
    # mlx-vlm reads a block_size at the top only.
    "z-lab": layout(zlab(block_size=6), ZLAB, VLM),
    "z-lab sliding": layout(zlab(**{**BOUNDED, "layer_types": MIXED}), ZLAB),
    "z-lab causal": layout(zlab(**BOUNDED, is_causal=True), ZLAB),
    "z-lab sliding, not causal": layout(zlab(**BOUNDED, is_causal=False), ZLAB),
    "z-lab scales": layout(zlab(nested=SCALES, rope_parameters=YARN), ZLAB),
    "incoai": layout(zlab(DFLASH_2, SELECTOR_KEYS), ZLAB, VLM, more=selector()),
    "incoai sliding": layout(zlab(DFLASH_2, SELECTOR_KEYS, **BOUNDED), ZLAB, more=selector()),
    "Meta": Layout(
        META, {META_NAMES.get(name, name): shape for name, shape in backbone().items()}, (VLM,)
    ),
    "DeepSpec": deepspec(WITH_HEAD),
    "DeepSpec Gemma 4": deepspec(
        {**WITH_HEAD, **GEMMA}, "Gemma4DSparkModel", model_type="gemma4_text", **GEMMA_KEYS
    ),
    "NVIDIA": deepspec({**markov(), **SINKS}, **NVIDIA_KEYS),
    "SpecForge": layout(SPECFORGE_CONFIG, DSPARK, VLM, more=markov()),
    "SpecForge YaRN": layout(
        {**SPECFORGE_CONFIG, "rope_parameters": YARN}, DSPARK, VLM, more=markov()
    ),
    "LFM2.5": layout(LFM, DSPARK, VLM, more=markov()),
    "Qwen3.5": deepspec({**WITH_HEAD, **GATED}, "Qwen35DSparkModel", **QWEN_KEYS),
    "speculators DFlash": speculators("dflash", **AFTER),
    "speculators DFlash at the anchor": speculators("dflash", sample_from_anchor=True),
    "speculators DFlash 2": speculators("dflash2", more=selector(), **AFTER, **SELECTOR_KEYS),
    "speculators DFlash sliding": speculators("dflash", SLIDING_LAYERS, **AFTER),
    "speculators DFlash 2 sliding": speculators(
        "dflash2", SLIDING_LAYERS, selector(), **AFTER, **SELECTOR_KEYS
    ),
    "speculators DSpark sliding": speculators(
        "dspark", MIXED_LAYERS, markov(), sample_from_anchor=True, **MARKOV_KEYS
    ),
    **{f"speculators DSpark {kind}": of_speculators(kind) for kind in ("vanilla", "gated", "rnn")},
}
# Token ids of a reduced head's rows.
REDUCED_IDS = np.arange(REDUCED) * 2 + 1


def tensors(layout: Layout) -> dict[str, NDArray[Any]]:
    """Draw matrices of unit gain, and norms around one; the tables of a reduced head are given."""
    drawn: dict[str, NDArray[Any]] = seeded(layout.shapes, 1)
    if layout.config.get("model_type") == "qwen3_5":
        drawn = {name: values - float("norm" in name) for name, values in drawn.items()}
    if "d2t" in drawn:
        drawn["d2t"] = REDUCED_IDS - np.arange(REDUCED)
        drawn["t2d"] = np.isin(np.arange(VOCAB), REDUCED_IDS)
    return drawn


def states(count: int) -> Floats:
    """Draw the target's states of the first tokens, shape (count, S H)."""
    drawn = np.random.RandomState(2).standard_normal((count, TAPPED * HIDDEN))
    return drawn.astype(np.float32)


def target_tables() -> tuple[Floats, Floats]:
    """Draw the target's input embedding and its head, both of shape (V, H)."""
    drawn = seeded(dict.fromkeys(("embedding", "head"), (VOCAB, HIDDEN)), 3)
    return drawn["embedding"], 3 * drawn["head"]

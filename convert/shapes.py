"""The drafter's config, inferred from the tensors' shapes and checked against ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.stored import StoredTensor
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import join_shortened, quote
from mlx_redrafter.proposers.checkpoint import describe_misfits
from mlx_redrafter.proposers.redrafter.config import Activation, DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter

Shapes = Mapping[str, tuple[int, ...]]

# This package's config key by TensorRT-LLM's, whose plain "hidden_size" is the target's.
_TENSORRT_KEYS = {
    "redrafter_num_layers": "num_draft_layers",
    "redrafter_hidden_size": "hidden_size",
    "redrafter_exit_dim": "exit_dim",
    "redrafter_is_rnn": "rnn",
}
_SHAPE_KEYS = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")
_VARIANT_KEYS = (
    "rnn_activation",
    "rnn_first_step_bias",
    "draft_top_k",
    "draft_vocab_size",
    "score_scale",
    "noise_share",
)
# Number of logits that Apple's `warp_logits` keeps.
APPLE_TOP_K = 50
_READABLE = ("float32", "float16", "bfloat16")
_READABLE_IDS = ("int32", "int64")


def infer_drafter_config(
    named: NamedTensors,
    tensors: Mapping[str, StoredTensor],
    values: Mapping[str, Any],
    rnn_activation: Activation | None = None,
) -> DrafterConfig:
    """Infer a drafter's config from ``config.json``, and from the shapes if a value is missing."""
    shapes = {own: tensors[source].shape for own, source in named.sources.items()}
    inferred = _infer_values(shapes)
    stated = _read_stated(values)
    lacking = [key for key in _SHAPE_KEYS if key not in inferred and key not in stated]
    if lacking:
        raise CheckpointError(
            f"expected a head (lm_head.*), which determines {', '.join(lacking)}, found none; "
            "check that the checkpoint is complete"
        )
    variant = _choose_variant(named, values, inferred)
    if rnn_activation is not None:
        variant["rnn_activation"] = rnn_activation
    config = DrafterConfig.from_dict({**inferred, **stated, **variant})
    if problems := describe_misfits(Drafter(config), shapes, named.sources):
        raise CheckpointError(
            f"the tensors do not fit a drafter with {_summarise(config)}: {problems}"
        )
    check_dtypes(named.sources, tensors)
    return config


def _infer_values(shapes: Shapes) -> dict[str, Any]:
    """Infer config values from the shapes, as far as the shapes determine them."""
    blocks = [name for name in shapes if name.startswith("lm_head.")]
    finals = [name for name in blocks if name.count(".") == 2]
    num_layers = max((int(name.split(".")[1]) for name in finals or blocks), default=0)
    values: dict[str, Any] = {
        "num_draft_layers": num_layers if finals else num_layers + 1,
        "rnn": any(name.startswith("rnn_") for name in shapes),
    }
    head = shapes.get(f"lm_head.{num_layers}.weight", ())
    if len(head) == 2:
        values["vocab_size"], values["exit_dim"] = head
    if len(recurrent := shapes.get("rnn_w.weight", ())) == 2:
        values["hidden_size"] = recurrent[0]
    elif len(projection := shapes.get("input_proj.weight", ())) == 2:
        values["hidden_size"] = projection[1] // 2
    elif "exit_dim" in values:
        values["hidden_size"] = values["exit_dim"] // 2
    return values


def _read_stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the shape in ``config.json``; Apple's default for "not given" is -1."""
    stated = {key: values[key] for key in _SHAPE_KEYS if key in values}
    stated.update({own: values[key] for key, own in _TENSORRT_KEYS.items() if key in values})
    return {key: value for key, value in stated.items() if value is not None and value != -1}


def _choose_variant(
    named: NamedTensors, values: Mapping[str, Any], inferred: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the values that no shape determines: by the config, or by the drafter's origin."""
    if named.name_set == "tensorrt-llm":
        return {"rnn_activation": "identity", "rnn_first_step_bias": False, "draft_top_k": None}
    variant = {key: values[key] for key in _VARIANT_KEYS if key in values}
    rows = cast(int, inferred.get("vocab_size", 0))
    variant.setdefault("draft_top_k", APPLE_TOP_K if rows > APPLE_TOP_K else None)
    return variant


def check_dtypes(
    sources: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    remedy: str = "save the drafter in one of these dtypes",
) -> None:
    """Raise `CheckpointError` unless tensors, named as in `read_weights`, can be read."""
    problems = []
    for own, source in sources.items():
        readable = _READABLE_IDS if own == "token_ids" else _READABLE
        if tensors[source].dtype not in readable:
            problems.append(f"{quote(source)} is {tensors[source].dtype}")
    if problems:
        raise CheckpointError(
            f"expected {', '.join(_READABLE)} (token ids: {' or '.join(_READABLE_IDS)}), but "
            f"{join_shortened(problems)}; {remedy}"
        )


def _summarise(config: DrafterConfig) -> str:
    return (
        f"hidden_size {config.hidden_size}, exit_dim {config.exit_dim}, num_draft_layers "
        f"{config.num_draft_layers}, vocab_size {config.vocab_size}, rnn {config.rnn}"
    )

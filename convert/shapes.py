"""The drafter's config from its tensors' shapes, held against what ``config.json`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mlx.utils import tree_flatten

from mlx_redrafter.config import Activation, DrafterConfig
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.stored import StoredTensor
from mlx_redrafter.convert.wording import listed, quoted
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.redrafter.network import Drafter

Shapes = Mapping[str, tuple[int, ...]]

# Our config key by the name in TensorRT-LLM's config, whose hidden_size is the target's own.
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
# What Apple's `warp_logits` keeps, always.
APPLE_TOP_K = 50
_READABLE = ("float32", "float16", "bfloat16")


def drafter_config(
    named: NamedTensors,
    tensors: Mapping[str, StoredTensor],
    values: Mapping[str, Any],
    rnn_activation: Activation | None = None,
) -> DrafterConfig:
    """The config of a drafter: ``config.json`` where it speaks, the shapes where it does not.

    Args:
        named: The drafter's tensors.
        tensors: By their names in the checkpoint.
        values: The checkpoint's ``config.json``.
        rnn_activation: What the user says, which no file can contradict.

    Raises:
        CheckpointError: Tensors are missing, unexpected, or of other shapes or dtypes than the
            config asks for, all of them named; or a value in ``config.json`` is out of range.
    """
    shapes = {own: tensors[source].shape for own, source in named.sources.items()}
    inferred = _inferred(shapes)
    stated = _stated(values)
    lacking = [key for key in _SHAPE_KEYS if key not in inferred and key not in stated]
    if lacking:
        raise CheckpointError(
            f"cannot tell {', '.join(lacking)} without a head (lm_head.*); "
            "is the checkpoint complete?"
        )
    variant = _variant(named, values, inferred)
    if rnn_activation is not None:
        variant["rnn_activation"] = rnn_activation
    config = DrafterConfig.from_dict({**inferred, **stated, **variant})
    _check_shapes(config, named, shapes)
    _check_dtypes(named, tensors)
    return config


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a drafter; nothing is allocated."""
    parameters = dict(tree_flatten(Drafter(config).parameters()))
    return {name: tensor.shape for name, tensor in parameters.items()}


def _inferred(shapes: Shapes) -> dict[str, Any]:
    """What the shapes imply, for those keys that they imply anything for."""
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


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says about the shape; Apple's default for "not given" is -1."""
    stated = {key: values[key] for key in _SHAPE_KEYS if key in values}
    stated.update({own: values[key] for key, own in _TENSORRT_KEYS.items() if key in values})
    return {key: value for key, value in stated.items() if value is not None and value != -1}


def _variant(
    named: NamedTensors, values: Mapping[str, Any], inferred: Mapping[str, Any]
) -> dict[str, Any]:
    """How the drafter computes, which no shape tells: by its origin, unless the config says."""
    if named.name_set == "tensorrt-llm":
        return {"rnn_activation": "identity", "rnn_first_step_bias": False, "draft_top_k": None}
    variant = {key: values[key] for key in _VARIANT_KEYS if key in values}
    rows = cast(int, inferred.get("vocab_size", 0))
    variant.setdefault("draft_top_k", APPLE_TOP_K if rows > APPLE_TOP_K else None)
    return variant


def _check_shapes(config: DrafterConfig, named: NamedTensors, found: Shapes) -> None:
    expected = expected_shapes(config)
    problems = [
        f"{name} is missing, expected shape {list(expected[name])}"
        for name in sorted(expected.keys() - found.keys())
    ]
    problems += [
        f"{quoted(named.sources[name])} of shape {list(found[name])} is unexpected"
        for name in sorted(found.keys() - expected.keys())
    ]
    problems += [
        f"{quoted(named.sources[name])} has shape {list(found[name])}, "
        f"expected {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        raise CheckpointError(
            f"the tensors do not fit a drafter with {_summary(config)}: {listed(problems, '; ')}"
        )


def _check_dtypes(named: NamedTensors, tensors: Mapping[str, StoredTensor]) -> None:
    problems = []
    for own, source in named.sources.items():
        readable = ("int32",) if own == "token_ids" else _READABLE
        if tensors[source].dtype not in readable:
            problems.append(f"{quoted(source)} is {tensors[source].dtype}")
    if problems:
        raise CheckpointError(
            f"expected {', '.join(_READABLE)} (token_ids: int32), but {listed(problems)}; "
            "save the drafter in one of these"
        )


def _summary(config: DrafterConfig) -> str:
    return (
        f"hidden_size {config.hidden_size}, exit_dim {config.exit_dim}, num_draft_layers "
        f"{config.num_draft_layers}, vocab_size {config.vocab_size}, rnn {config.rnn}"
    )

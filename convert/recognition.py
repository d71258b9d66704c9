"""Recognition of checkpoints that are not recurrent drafters, for messages that name the kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_redrafter.convert.source import Source
from mlx_redrafter.recognition import find_refused

# Medusa: "{head}.{layer}.linear.*" and "{head}.{n}.weight", every head a stack of its own.
_MEDUSA = re.compile(
    r"(?:medusa_heads?\.)?([0-9]{1,4})\.[0-9]{1,4}\.(?:linear\.(?:weight|bias)|weight)"
)
# Kind of each other drafter by the model type in its config.
_MODEL_TYPES = {
    "medusa": "a Medusa checkpoint (parallel heads, not a recurrent drafter)",
    "eagle": "an EAGLE checkpoint whose tensors are not those of SafeAILab's files",
}


def recognise_foreign(source: Source) -> str | None:
    """Recognise a checkpoint that is not a recurrent drafter.

    Returns:
        Kind of the checkpoint in words, or None if it may be a recurrent drafter.
    """
    config, names = source.config, list(source.tensors)
    if _is_quantized_mlx(config):
        return "an MLX drafter that is quantised already; convert the drafter it was made from"
    if _is_split(config):
        return (
            "one rank of a TensorRT-LLM checkpoint split over several; build it again with "
            "--tp_size 1, or convert the drafter it was made from"
        )
    if (refusal := find_refused(config)) is not None:
        return f"a {refusal}"
    for key in ("model_type", "speculators_model_type"):
        if (model_type := config.get(key)) in tuple(_MODEL_TYPES):
            return _MODEL_TYPES[model_type]
    heads = {int(match[1]) for name in names if (match := _MEDUSA.fullmatch(name))}
    if heads:
        return _recognise_medusa(source, heads)
    bare = [name.removeprefix("model.") for name in names]
    if "embed_tokens.weight" in bare and not _has_drafter_parts(names):
        return "a language model, not a drafter; use it as the --target"
    return None


def _is_quantized_mlx(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization")
    return isinstance(quantization, Mapping) and "bits" in quantization


def _is_split(config: Mapping[str, Any]) -> bool:
    mapping = config.get("mapping")
    return isinstance(mapping, Mapping) and mapping.get("tp_size", 1) != 1


def _recognise_medusa(source: Source, heads: set[int]) -> str | None:
    """Tell whether names "{head}.{layer}" are Medusa's or those of a bare ReDrafter head, "0.*".

    A single stack can be either. Medusa's linear layers are as wide as the hidden state; those of a
    ReDrafter head without input_proj are twice as wide.
    """
    says_medusa = (
        any(key.startswith("medusa") for key in source.config)
        or any(name.startswith("medusa") for name in source.tensors)
        or any(path.name.startswith("medusa") for path in source.files)
    )
    hidden_size = source.config.get("hidden_size")
    width = {tensor.shape[-1:] for name, tensor in source.tensors.items() if name.startswith("0.")}
    if heads != {0} or says_medusa or width == {(hidden_size,)}:
        return f"a Medusa checkpoint ({len(heads)} parallel heads, not a recurrent drafter)"
    if hidden_size is None and not _has_drafter_parts(source.tensors):
        return (
            "either a ReDrafter head or a Medusa head, which only the target's hidden_size can "
            "tell apart; add hidden_size to config.json"
        )
    return None


def _has_drafter_parts(names: Iterable[str]) -> bool:
    return any("input_proj" in name or "rnn_" in name or "drafter." in name for name in names)

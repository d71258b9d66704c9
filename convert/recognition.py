"""Recognition of checkpoints: Medusa heads, and kinds that cannot be converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_redrafter import proposers
from mlx_redrafter.checkpoints.recognition import find_refused
from mlx_redrafter.convert.source import Source
from mlx_redrafter.escaping import quote
from mlx_redrafter.proposers import block, draft_model, eagle, medusa, mtp, redrafter
from mlx_redrafter.proposers.medusa.layouts import heads_of

# Kinds that are converted, and the draft model, whose sign is any config of a model.
_KNOWN = (block, redrafter, eagle, medusa, mtp, draft_model)


def has_medusa(source: Source) -> bool:
    """Return whether a checkpoint seems to be one of Medusa heads."""
    is_named_so = any(path.name.startswith("medusa") for path in source.files)
    return is_named_so or medusa.recognise(source.config, source.shapes)


def recognise_foreign(source: Source) -> str | None:
    """Name the kind of a checkpoint that cannot be converted; None if it may be one that can."""
    config, names = source.config, list(source.tensors)
    quantization, mapping = config.get("quantization"), config.get("mapping")
    if isinstance(quantization, Mapping) and "bits" in quantization:
        return "an MLX drafter that is quantised already; convert the drafter it was made from"
    if isinstance(mapping, Mapping) and mapping.get("tp_size", 1) != 1:
        return (
            "one rank of a TensorRT-LLM checkpoint split over several; build it again with "
            "--tp_size 1, or convert the drafter it was made from"
        )
    if (refusal := find_refused(config)) is not None:
        return f"a {refusal}"
    if "eagle" in (config.get("model_type"), config.get("speculators_model_type")):
        return "an EAGLE checkpoint whose tensors are not those of SafeAILab's files"
    for kind in proposers.KINDS:
        if kind not in _KNOWN and kind.recognise(config, source.shapes):
            return f"{kind.NAME}, which `load` reads as it is"
    if mtp.recognise(config, source.shapes):
        return f"an MTP module of a model of type {quote(str(config.get('model_type')))}"
    if has_medusa(source):
        return None
    if heads_of(names) and "hidden_size" not in config and not _has_drafter_parts(names):
        return (
            "either a ReDrafter head or a Medusa head, which only the target's hidden_size can "
            "tell apart; add hidden_size to config.json"
        )
    bare = [name.removeprefix("model.") for name in names]
    if "embed_tokens.weight" in bare and not _has_drafter_parts(names):
        return "a language model, not a drafter; use it as the --target"
    return None


def _has_drafter_parts(names: Iterable[str]) -> bool:
    return any("input_proj" in name or "rnn_" in name or "drafter." in name for name in names)

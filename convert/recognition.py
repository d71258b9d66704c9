"""Recognition of checkpoints: the kind that is converted, or the name of one that is not."""

from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter import proposers
from mlx_redrafter.checkpoints.recognition import find_refused
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.convert.block import ForeignBlock
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.eagle import ForeignEagle
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.medusa import ForeignMedusa
from mlx_redrafter.convert.mtp import ForeignMtp, find_mtp
from mlx_redrafter.convert.recurrent import ForeignRecurrent
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.errors import CheckpointError, quote
from mlx_redrafter.proposers import block, draft_model, eagle, medusa, mtp, redrafter
from mlx_redrafter.proposers.medusa.layouts import heads_of

# Kinds that are converted, and the draft model, whose sign is any config of a model.
_KNOWN = (block, redrafter, eagle, medusa, mtp, draft_model)


class Inspection(NamedTuple):
    """A checkpoint as `convert_drafter` sees it, and its kind in words.

    ``config`` is that of the converted drafter, or None if there can be no conversion. ``notes``
    name tensors that a conversion would leave out, or say why there can be none.
    """

    source: Source
    kind: str
    config: Any
    notes: tuple[str, ...]


def inspect_checkpoint(path_or_repo: str | Path) -> Inspection:
    """Inspect a checkpoint, without reading its values or writing anything."""
    source, kind = recognise(path_or_repo)
    if isinstance(kind, str):
        return Inspection(source, kind, None, ())
    try:
        drafter = kind(source, ConversionOptions())
    except CheckpointError as error:
        noun = kind.noun if kind in (ForeignEagle, ForeignMtp) else "a drafter"
        return Inspection(source, f"{noun} that cannot be converted", None, (str(error),))
    return Inspection(drafter.source, drafter.kind, drafter.config, tuple(drafter.notes))


def recognise(path_or_repo: str | Path) -> tuple[Source, type[ForeignDrafter] | str]:
    """Open a checkpoint, and find its kind, or the name of a kind that cannot be converted."""
    if (module := find_mtp(path_or_repo)) is not None:
        return module, ForeignMtp
    source = open_source(path_or_repo)
    if "bits" in as_mapping(source.config.get("quantization")):
        quantised = "an MLX drafter that is quantised already"
        return source, f"{quantised}; convert the drafter it was made from"
    if block.recognise(source.config, source.shapes):
        return source, ForeignBlock
    if eagle.recognise(source.config, source.shapes):
        return source, ForeignEagle
    is_named_so = any(path.name.startswith("medusa") for path in source.files)
    has_medusa = is_named_so or medusa.recognise(source.config, source.shapes)
    if (refused := _recognise_refused(source, has_medusa)) is not None:
        return source, refused
    return source, ForeignMedusa if has_medusa else ForeignRecurrent


def _recognise_refused(source: Source, has_medusa: bool) -> str | None:
    """Name the kind of a checkpoint that cannot be converted; None if it may be one that can."""
    config, names = source.config, list(source.tensors)
    if as_mapping(config.get("mapping")).get("tp_size", 1) != 1:
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
    parts = ("input_proj", "rnn_", "drafter.")
    if has_medusa or any(part in name for part in parts for name in names):
        return None
    if heads_of(names) and "hidden_size" not in config:
        return (
            "either a ReDrafter head or a Medusa head, which only the target's hidden_size can "
            "tell apart; add hidden_size to config.json"
        )
    if "embed_tokens.weight" in [name.removeprefix("model.") for name in names]:
        return "a language model, not a drafter; use it as the --target"
    return None

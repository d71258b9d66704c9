"""Inspection of a checkpoint, without reading its values or writing anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_redrafter.convert.block import inspect_block
from mlx_redrafter.convert.conversion_options import Config
from mlx_redrafter.convert.eagle import describe_eagle, open_eagle
from mlx_redrafter.convert.mtp import check_mtp, describe_mtp, find_mtp
from mlx_redrafter.convert.names import NamedTensors, map_names
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.convert.recognition import has_medusa, recognise_foreign
from mlx_redrafter.convert.shapes import infer_drafter_config
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import quote
from mlx_redrafter.proposers import block, eagle
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.layouts import NamedHeads, read_heads
from mlx_redrafter.proposers.redrafter.config import DrafterConfig

# Key in config.json by which published heads name their model.
TARGET_KEY = "base_model_name_or_path"


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as `convert_drafter` sees it, and its kind in words.

    ``config`` is that of the converted drafter, or None if there can be no conversion. ``notes``
    name tensors that a conversion would leave out, or say why there can be none.
    """

    source: Source
    kind: str
    config: Config | None
    notes: tuple[str, ...]


def inspect_checkpoint(path_or_repo: str | Path) -> Inspection:
    """Inspect a checkpoint."""
    module = find_mtp(path_or_repo)
    source = module or open_source(path_or_repo)
    is_block = module is None and block.recognise(source.config, source.shapes)
    is_eagle = module is None and not is_block and eagle.recognise(source.config, source.shapes)
    if not (module or is_block or is_eagle) and (kind := recognise_foreign(source)) is not None:
        return Inspection(source, kind, None, ())
    kind = "an EAGLE head" if is_eagle else "a drafter" if module is None else "an MTP module"
    try:
        if module is not None:
            config, rest = check_mtp(module)
            return Inspection(rest, describe_mtp(module), config, ())
        if is_block:
            return Inspection(source, *inspect_block(source), ())
        if is_eagle:
            head, named = open_eagle(source)
            return Inspection(source, describe_eagle(source, head), head.config, named.notes)
        return _inspect_named(source)
    except CheckpointError as error:
        return Inspection(source, f"{kind} that cannot be converted", None, (str(error),))


def _inspect_named(source: Source) -> Inspection:
    """Inspect a recurrent drafter or Medusa heads, whose tensors are found by their names."""
    named: NamedTensors | NamedHeads
    config: DrafterConfig | MedusaConfig
    if has_medusa(source):
        noun = "Medusa heads"
        named = read_heads(source.config, source.shapes)
        config = named.config
    else:
        noun = "a recurrent drafter"
        named = map_names(source.tensors, source.config)
        config = infer_drafter_config(named, source.tensors, source.config)
    if PROVENANCE_KEY in source.config:
        kind = f"{noun}, written by this converter"
    else:
        kind = f"{noun} with {named.name_set} names"
    target = source.config.get(TARGET_KEY)
    kind += f", for {quote(target)}" if isinstance(target, str) else ""
    return Inspection(source, kind, config, named.notes)

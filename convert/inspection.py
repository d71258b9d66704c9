"""What a checkpoint is, found out without reading any values or writing anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.convert.names import map_names
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.convert.recognition import foreign_kind
from mlx_redrafter.convert.shapes import drafter_config
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.errors import CheckpointError


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as `convert_drafter` sees it.

    Attributes:
        source: The files and tensors.
        kind: What it is, in words.
        config: The drafter that a conversion would give, None when there is none.
        notes: What a conversion would leave out, or why there is none.
    """

    source: Source
    kind: str
    config: DrafterConfig | None
    notes: tuple[str, ...]


def inspect_checkpoint(path_or_repo: str | Path) -> Inspection:
    """Find out what a checkpoint is.

    Raises:
        CheckpointError: There is none, or a file is damaged or hostile.
    """
    source = open_source(path_or_repo)
    if (kind := foreign_kind(source)) is not None:
        return Inspection(source, kind, None, ())
    try:
        named = map_names(source.tensors, source.config)
        config = drafter_config(named, source.tensors, source.config)
    except CheckpointError as error:
        return Inspection(source, "no drafter that can be converted", None, (str(error),))
    if PROVENANCE_KEY in source.config:
        kind = "a recurrent drafter, written by this converter"
    else:
        kind = f"a recurrent drafter with {named.name_set} names"
    return Inspection(source, kind, config, named.notes)

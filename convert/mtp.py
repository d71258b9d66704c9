"""Conversion of MTP modules, from a model's own files or from a folder of their own."""

import re
from dataclasses import replace
from pathlib import Path

from mlx_redrafter.checkpoint_files import CONFIG_FILE, find_checkpoint, read_config, shared_name
from mlx_redrafter.checkpoints.identity import REPOSITORY
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.convert.source import Source, read_file
from mlx_redrafter.errors import quote
from mlx_redrafter.proposers import block, eagle, medusa
from mlx_redrafter.proposers.mtp import load
from mlx_redrafter.proposers.mtp.families import (
    has_family,
    is_mtp,
    model_of_layers,
    model_type_of,
    prefix_of,
)
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.mtp.tensors import INDEX, find_module, open_module

# A model's name in a conversion, which goes to the new card: a repository's, or that of a folder.
NAME = re.compile(rf"[\w-][\w.-]*|{REPOSITORY.pattern}")


def find_mtp(path_or_repo: str | Path) -> Source | None:
    """Find the MTP module in a checkpoint; return None if the config is of another model.

    From a repository, only the files with the module are downloaded.
    """
    folder = find_checkpoint(path_or_repo, [CONFIG_FILE, INDEX])
    values = read_config(folder) if (folder / CONFIG_FILE).exists() else {}
    others = (block, eagle, medusa)
    if not has_family(values) or any(kind.recognise(values, {}) for kind in others):
        return None
    folder, paths = find_module(path_or_repo)
    tensors = {name: one for path in paths for name, one in read_file(path).items()}
    source = Source(shared_name(path_or_repo), folder, values, tuple(paths), tensors)
    # A model that lacks its module is refused as such, without fetching the rest of it.
    is_model = (folder / INDEX).exists() or any("embed_tokens." in name for name in tensors)
    has_module = any(name.startswith(prefix_of(values)) for name in tensors)
    return source if is_model or has_module else None


class ForeignMtp(ForeignDrafter):
    noun = "an MTP module"
    linked = "An MTP module"
    name_set = "MTP"

    def __init__(self, source: Source, options: ConversionOptions):
        module, _, self.names = open_module(source.folder, source.files)
        prefix = prefix_of(source.config)
        own = {name: one for name, one in source.tensors.items() if name.startswith(prefix)}
        super().__init__(replace(source, tensors=own), options)
        self.config = module.config
        self.target = _target_of(source)
        noun = f"an MTP module of a model of type {quote(model_type_of(source.config))}"
        self.kind = self.describe(noun, "")
        # mlx-lm keeps the dtype of some weights, such as biases of routers.
        self.is_cast = getattr(model_of_layers(source.config), "cast_predicate", self.is_cast)

    def build(self) -> Mtp:
        return load(self.source.folder)


def _target_of(source: Source) -> str | None:
    """Return the name of a module's model: that of its files, or that in a conversion."""
    if PROVENANCE_KEY in source.config:
        target = as_mapping(source.config[PROVENANCE_KEY]).get("target")
        return target if isinstance(target, str) and NAME.fullmatch(target) else None
    is_alone = is_mtp(source.config, source.shapes) and not (source.folder / INDEX).exists()
    return None if is_alone else source.name

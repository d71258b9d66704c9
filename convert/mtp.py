"""Conversion of MTP modules, from a model's own files or from a folder of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    find_checkpoint,
    named_parameters,
    read_config,
    shared_name,
)
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.output import ConvertedDrafter, finish
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.convert.safetensors_file import read_safetensors_file
from mlx_redrafter.convert.selftest import SelfTest, choose_reading, compare, load_target
from mlx_redrafter.convert.source import Source
from mlx_redrafter.escaping import quote
from mlx_redrafter.proposers import block, eagle, medusa
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.families import (
    has_family,
    is_mtp,
    model_of_layers,
    model_type_of,
    prefix_of,
    published_name,
)
from mlx_redrafter.proposers.mtp.network import MtpConfig
from mlx_redrafter.proposers.mtp.tensors import INDEX, find_module, open_module


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
    tensors = {name: one for path in paths for name, one in read_safetensors_file(path).items()}
    source = Source(shared_name(path_or_repo), folder, values, tuple(paths), tensors)
    # A model that lacks its module is refused as such, without fetching the rest of it.
    is_model = _has_index(source) or any("embed_tokens." in name for name in tensors)
    has_module = any(name.startswith(prefix_of(values)) for name in tensors)
    return source if is_model or has_module else None


def describe_mtp(source: Source) -> str:
    """Describe the kind of a module, and the model that it is for."""
    kind = f"an MTP module of a model of type {quote(model_type_of(source.config))}"
    kind += ", written by this converter" if PROVENANCE_KEY in source.config else ""
    target = _target_of(source)
    return kind + (f", for {quote(target)}" if target else "")


def check_mtp(source: Source) -> tuple[MtpConfig, Source]:
    """Return a module's config, and the checkpoint without the rest of the model."""
    module, *_ = open_module(source.folder, source.files)
    prefix = prefix_of(source.config)
    tensors = {name: one for name, one in source.tensors.items() if name.startswith(prefix)}
    return module.config, replace(source, tensors=tensors)


def convert_mtp(source: Source, options: ConversionOptions) -> ConvertedDrafter:
    """Convert an MTP module; see `conversion.convert_drafter`."""
    module = load_mtp(source.folder)
    prefix = prefix_of(source.config)
    names = {own: published_name(own, module.names, prefix) for own in named_parameters(module)}
    # mlx-lm keeps the dtype of some weights, such as biases of routers.
    is_cast = getattr(model_of_layers(source.config), "cast_predicate", lambda name: True)
    finish(module, source.name, names, options, is_cast)
    measured = None
    if options.target is not None:
        target, tokenizer = load_target(module, options.target)
        layers = module.captured_layers(target)
        found = choose_reading(
            {"as it says": module}, target, tokenizer, compare, lambda network: layers
        )
        measured = SelfTest.of(found.matches)
    return ConvertedDrafter(
        module,
        "MTP",
        measured,
        warnings=() if measured is None else measured.warnings(),
        target=_target_of(source),
    )


def _has_index(source: Source) -> bool:
    return (source.folder / INDEX).exists()


def _target_of(source: Source) -> str | None:
    """Return the name of a module's model: that of its files, or that in a conversion."""
    provenance = source.config.get(PROVENANCE_KEY)
    if isinstance(provenance, Mapping):
        target = provenance.get("target")
        return target if isinstance(target, str) else None
    is_alone = is_mtp(source.config, source.shapes) and not _has_index(source)
    return None if is_alone else source.name

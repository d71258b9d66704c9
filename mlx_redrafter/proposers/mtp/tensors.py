"""Tensors of MTP modules: in a model's own files, or in a folder with nothing else in it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import (
    find_checkpoint,
    has_weights,
    named_parameters,
    read_config,
    read_json,
    read_shapes,
    weight_files,
)
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.errors import CheckpointError, first_line, quote
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY, PATTERNS, check_shapes, misfit
from mlx_redrafter.proposers.mtp.families import (
    FAMILIES,
    is_sidecar,
    model_of_layers,
    model_type_of,
    prefix_of,
    published_name,
)
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.quantization import quantize_as_stored
from mlx_redrafter.target.model_parts import check_config

INDEX = "model.safetensors.index.json"
# Endings of the names of scales for quantised K/V entries, which are not read.
KV_SCALES = (".k_scale", ".v_scale")
# Names of experts' tensors, one by one.
EXPERT = re.compile(r"(.*)experts\.\d+\.(.*)")


def find_module(path_or_repo: str | Path) -> tuple[Path, list[Path]]:
    """Fetch the weight files of a module, and return its folder and those files.

    Without an index of shards, the files may hold the whole model.
    """
    folder = find_checkpoint(path_or_repo, [*CONFIG_ONLY, INDEX])
    values = read_config(folder)
    prefix = prefix_of(values)
    check_config({**values, "model_type": model_type_of(values)})
    files = indexed_files(folder, prefix)
    if files != []:
        folder = find_checkpoint(path_or_repo, files or PATTERNS)
    if files:
        return folder, [folder / file for file in files]
    return folder, weight_files(folder) if has_weights(folder) else []


def open_module(
    folder: Path, paths: Sequence[Path]
) -> tuple[Mtp, dict[str, mx.array], dict[str, str]]:
    """Make a module of the right sizes, and return it with its weights and their published names.

    MLX has not read the weights yet.
    """
    values = read_config(folder)
    tensors = _read_module(folder, paths, values)
    module = _new_module(folder, values)
    weights = _rename(tensors, module, folder)
    shapes = {own: tensor.shape for own, tensor in weights.items()}
    if "quantization" in values:
        quantize_as_stored(module, values["quantization"], shapes)
    prefix = prefix_of(values)
    names = {
        own: published_name(own, module.names, prefix)
        for own in named_parameters(module).keys() | shapes.keys()
    }
    check_shapes(module, shapes, folder, names)
    return module, weights, names


def indexed_files(folder: Path, prefix: str) -> list[str] | None:
    """Return the files that an index names for tensors of a prefix; None without an index."""
    path = folder / INDEX
    if not path.exists():
        return None
    named = map(_checked, as_mapping(read_json(path).get("weight_map")).items())
    return sorted({file for name, file in named if name.startswith(prefix)})


def _checked(entry: tuple[str, Any]) -> tuple[str, str]:
    name, file = entry
    is_plain = isinstance(file, str) and PurePosixPath(file).name == file
    if not is_plain or not file.endswith(".safetensors") or set(file) & set("*?[\\"):
        raise CheckpointError(
            f"expected the name of a safetensors file for {quote(name)} in {INDEX}, "
            f"found {quote(str(file))}; download it again"
        )
    return name, file


def _read_module(
    folder: Path, paths: Sequence[Path], values: Mapping[str, Any]
) -> dict[str, mx.array]:
    """Read tensors by their names after the prefix, with weights of norms as mlx-lm uses them."""
    family, prefix = FAMILIES[model_type_of(values)], prefix_of(values)
    read_shapes(folder, list(paths))
    tensors: dict[str, mx.array] = {}
    for path in paths:
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
        except RuntimeError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        stored, metadata = loaded
        # Files that MLX programs wrote have norms and experts in the form of mlx-lm's layers.
        is_published = prefix != "" and metadata.get("format") != "mlx"
        offset = family.norm_offset if is_published else 0.0
        for name, tensor in stored.items():
            bare = name.removeprefix(prefix)
            if is_sidecar(values):
                old = next(filter(bare.startswith, family.sidecar), "")
                bare = family.sidecar.get(old, "") + bare.removeprefix(old)
            is_read = not bare.startswith(family.left_out) and not bare.endswith(KV_SCALES)
            if name.startswith(prefix) and is_read:
                is_norm = "norm" in bare.rpartition(".")[0].rpartition(".")[2]
                tensors[bare] = tensor + offset if offset and is_norm else tensor
    if not tensors:
        raise CheckpointError(
            f"no tensors {prefix}* in {folder}, which converted copies often lack; give the "
            "folder of the original model, or of its MTP tensors, as the drafter"
        )
    return tensors


def _new_module(folder: Path, values: Mapping[str, Any]) -> Mtp:
    try:
        module = Mtp(values)
        row = mx.zeros((1, module.config.hidden_size))
        module(row, row, module.make_cache())  # never computed: it fails unless the parts fit
        return module
    except Exception as error:  # what is made of damaged files may raise anything
        raise CheckpointError(
            f"the config.json in {folder} does not describe a model: {first_line(error)}; download "
            "it again"
        ) from error


def _rename(tensors: Mapping[str, mx.array], module: Mtp, folder: Path) -> dict[str, mx.array]:
    """Map tensors to the names of `Mtp`.

    mlx-lm's own preparation of a layer stacks experts, and unpacks FP8 and latent attention.
    """
    family, names, values = module.family, module.names, module.config.values
    model = model_of_layers(values)
    laid = {family.base + name: tensor for name, tensor in tensors.items()}
    try:
        laid = stack_experts(laid) if family.norm_offset else model.sanitize(laid)
    except KeyError as error:
        name = str(error.args[0]).replace(family.base, prefix_of(values), 1)
        raise misfit(folder, f"{name} is missing") from error
    except Exception as error:  # mlx-lm checks no shape before
        raise misfit(folder, first_line(error)) from error
    renamed = {}
    for name, tensor in laid.items():
        bare = name.removeprefix(family.base)
        old = next(filter(bare.startswith, names), "")
        renamed[names.get(old, "block.") + bare.removeprefix(old)] = tensor
    return renamed


def stack_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Stack the weights of experts as mlx-lm's layers have them, in one tensor per projection.

    Experts may stand one by one (``experts.{e}.up_proj.weight``), or stacked with two projections
    in one tensor (``experts.gate_up_proj``). A missing one raises KeyError.
    """
    laid: dict[str, mx.array] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, tensor in tensors.items():
        parts = EXPERT.fullmatch(name)
        if parts is not None:
            counts[parts[1], parts[2]] += 1
        elif name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            gates, ups = mx.split(tensor, 2, axis=-2)
            laid |= {f"{base}gate_proj.weight": gates, f"{base}up_proj.weight": ups}
        elif name.endswith("experts.down_proj"):
            laid[name.replace("experts.", "switch_mlp.") + ".weight"] = tensor
        else:
            laid[name] = tensor
    for (base, rest), num in counts.items():
        stack = mx.stack([tensors[f"{base}experts.{e}.{rest}"] for e in range(num)])
        laid[f"{base}switch_mlp.{rest}"] = stack
    return laid

"""Loading and saving drafters, quantised ones included.

The folder follows mlx-lm's habits: ``config.json`` (with ``"quantization": {"group_size", "bits"}``
when the weights are quantised) beside ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import (
    WEIGHTS_PATTERNS,
    find_checkpoint,
    named_parameters,
    read_config,
    read_shapes,
    read_tensors,
    write_checkpoint,
)
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter

PATTERNS = ["config.json", *WEIGHTS_PATTERNS, "README.md"]
QUANTIZED_BITS = (2, 3, 4, 6, 8)
QUANTIZED_GROUP_SIZES = (32, 64, 128)
# Apple's checkpoints may carry it; their forward pass never applies it.
UNUSED_TENSORS = ("emb_norm.weight",)


def load_drafter(path_or_repo: str | Path) -> Drafter:
    """Load a drafter from a folder or a hub repository.

    Args:
        path_or_repo: A folder with ``config.json`` and ``model.safetensors``, or a repository id.

    Returns:
        The drafter in the dtype it was stored in, its weights in memory.

    Raises:
        CheckpointError: Files are missing, truncated or foreign, or the config or ``token_ids`` has
            values out of range; every tensor that is missing, unexpected or of another shape is
            named.
        NonFiniteError: A weight is NaN or infinite.
    """
    folder = find_checkpoint(path_or_repo, PATTERNS)
    values = read_config(folder)
    drafter = Drafter(DrafterConfig.from_dict(values))
    fill(drafter, folder, values)
    return drafter


def fill(
    drafter: nn.Module,
    folder: Path,
    values: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
) -> None:
    """Give a new network the weights in a folder, quantised if they are; see `load_drafter`.

    Args:
        drafter: The network.
        folder: The folder.
        values: The object in its ``config.json``.
        sources: Name of every tensor there by its name in the network, if they differ.
    """
    shapes = read_shapes(folder)
    if sources is None:
        sources = {name: name for name in shapes if name not in UNUSED_TENSORS}
    stored = {own: shapes[name] for own, name in sources.items()}
    if "quantization" in values:
        quantize_as_stored(drafter, values["quantization"], stored)
    check_shapes(drafter, stored, folder, sources)
    tensors = read_tensors(folder)
    drafter.load_weights([(own, tensors[name]) for own, name in sources.items()])
    check_finite(drafter, folder)
    check_token_ids(drafter, folder)
    drafter.eval()


def save_drafter(
    drafter: DraftNetwork, folder: str | Path, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter so that `load_drafter` reads it back; files appear whole or not at all.

    Args:
        drafter: The drafter, quantised or not.
        folder: Destination folder, created when it does not exist.
        extra_config: Further keys for ``config.json``, such as where the weights come from.
    """
    config = drafter.config.to_dict()
    if drafter.quantization is not None:
        config["quantization"] = drafter.quantization
    config.update(extra_config or {})
    write_checkpoint(Path(folder), config, named_parameters(drafter))


def copy_drafter(drafter: Drafter) -> Drafter:
    """A drafter of the same weights, not quantised, whose layers can change without the other's."""
    copy = Drafter(drafter.config)
    copy.update(drafter.parameters())
    copy.eval()
    return copy


def quantize_drafter(drafter: nn.Module, bits: int, group_size: int) -> None:
    """Quantise the drafter's linear layers in place; layers whose width does not divide stay.

    So do routers of experts: they are small, and rounding would change who is asked.

    Raises:
        ConfigError: MLX has no such bits or group size, or no layer can be quantised with it.
    """
    check_quantization(bits, group_size)
    fitting = [
        name
        for name, module in drafter.named_modules()
        if hasattr(module, "to_quantized")
        and module.weight.shape[-1] % group_size == 0
        and not name.endswith("gate")
    ]
    if not fitting:
        raise ConfigError(
            f"no layer of the drafter is a multiple of group_size {group_size} wide; "
            "use a smaller one or leave the drafter unquantised"
        )
    nn.quantize(drafter, group_size, bits, class_predicate=lambda name, _: name in fitting)


def check_quantization(bits: Any, group_size: Any) -> None:
    """Raise `ConfigError` unless MLX can quantise so."""
    if bits not in QUANTIZED_BITS:
        raise ConfigError(f"quantisation bits must be one of {QUANTIZED_BITS}, got {bits!r}")
    if group_size not in QUANTIZED_GROUP_SIZES:
        raise ConfigError(
            f"quantisation group_size must be one of {QUANTIZED_GROUP_SIZES}, got {group_size!r}"
        )


def check_finite(
    drafter: nn.Module, name: str | Path, names: Mapping[str, str] | None = None
) -> None:
    """Raise `NonFiniteError` naming the tensors of ``drafter`` that hold NaN or infinity.

    ``names`` are those in the checkpoint by the network's, where they differ. Waits for the device.
    """
    floating = {
        name: tensor
        for name, tensor in named_parameters(drafter).items()
        if mx.issubdtype(tensor.dtype, mx.floating)
    }
    finite = to_ints(mx.stack([mx.all(mx.isfinite(tensor)) for tensor in floating.values()]))
    called = [(names or {}).get(own, own) for own in floating]
    bad = [own for own, is_finite in zip(called, finite, strict=True) if not is_finite]
    if bad:
        raise NonFiniteError(
            f"the drafter {name} has NaN or infinite weights in {', '.join(bad)}; "
            "convert or train it again, in float32 or bfloat16 if float16 overflowed"
        )


def check_floating(
    drafter: nn.Module,
    weights: Mapping[str, mx.array],
    name: str | Path,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raise `CheckpointError` naming weights that are integers where they should not be.

    Quantised weights of other programs have the right shapes, too. ``names`` are those in the
    checkpoint by the network's, where they differ.
    """
    parameters = named_parameters(drafter)
    problems = [
        f"{(names or {}).get(own, own)} is {weight.dtype}"
        for own, weight in weights.items()
        if mx.issubdtype(weight.dtype, mx.floating)
        != mx.issubdtype(parameters[own].dtype, mx.floating)
    ]
    if problems:
        raise CheckpointError(
            f"expected floating-point weights in {name}, found {'; '.join(problems)}; use a head "
            "that is not quantised"
        )


def check_token_ids(drafter: Any, name: str | Path) -> None:
    """Raise `CheckpointError` if two rows of the head propose one token, or one an unknown token.

    Equal siblings in a tree would both be accepted; an id out of range reads foreign memory.
    """
    if "token_ids" not in drafter:
        return
    last = drafter.config.vocab_size - 1
    dtype = drafter.token_ids.dtype
    ids = to_ints(drafter.token_ids)
    if not mx.issubdtype(dtype, mx.integer):
        found = f"integers, found {dtype}"
    elif not 0 <= min(ids) <= max(ids) <= last:
        found = f"ids from 0 to {last}, found {min(ids)} to {max(ids)}"
    elif len(set(ids)) < len(ids):
        found = "distinct ids, found some twice"
    else:
        return
    raise CheckpointError(f"token_ids in {name} must be {found}; convert or train it again")


def quantize_as_stored(
    drafter: nn.Module, quantization: object, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Quantise the layers of a new network whose stored weights are.

    Args:
        drafter: The network.
        quantization: Its value in ``config.json``.
        stored: Shapes of the stored tensors by name.

    Raises:
        CheckpointError: MLX cannot quantise so.
    """
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f'expected "quantization" to be an object in config.json, got {quantization!r}'
        )
    bits: Any = quantization.get("bits")
    group_size: Any = quantization.get("group_size")
    try:
        check_quantization(bits, group_size)
        nn.quantize(
            drafter,
            group_size,
            bits,
            class_predicate=lambda name, _: f"{name}.scales" in stored,
        )
    except ValueError as error:  # ConfigError is one
        raise CheckpointError(
            f"the drafter's config.json asks for a quantisation that does not fit: {error}"
        ) from error


def check_shapes(
    drafter: nn.Module,
    stored: Mapping[str, tuple[int, ...]],
    folder: str | Path,
    names: Mapping[str, str] | None = None,
) -> None:
    """Check that stored tensors are those of a network.

    Args:
        drafter: The network.
        stored: Shapes of the stored tensors, by the network's names.
        folder: Name of the checkpoint.
        names: Names in the checkpoint by the network's, where they differ.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of other shapes, all of them named.
    """
    expected = {name: tensor.shape for name, tensor in named_parameters(drafter).items()}
    found = {name: shape for name, shape in stored.items() if name not in UNUSED_TENSORS}
    called = {name: (names or {}).get(name, name) for name in expected.keys() | found.keys()}
    problems = [f"{called[name]} is missing" for name in expected.keys() - found.keys()]
    problems += [
        f"{called[name]} is not part of a drafter" for name in found.keys() - expected.keys()
    ]
    problems += [
        f"{called[name]} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if tuple(found[name]) != tuple(expected[name])
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(sorted(problems))}"
        )

"""Checkpoints of drafters: one way to read, check and write them, for networks of every kind.

A folder has ``config.json`` (with ``"quantization": {"group_size", "bits"}`` if the weights are
quantised) next to ``model.safetensors``, as in mlx-lm.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    WEIGHTS_PATTERNS,
    find_checkpoint,
    named_parameters,
    read_config,
    read_shapes,
    read_tensors,
    write_checkpoint,
)
from mlx_redrafter.checks import as_mapping, check_instance
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    explain,
    first_line,
    join_shortened,
    quote,
)
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.quantization import quantization_of, quantize_as_stored

CONFIG_ONLY = [CONFIG_FILE]
# Name of a file of torch that block drafters may have: an embedding instead of the mask token's.
MASK_FILE = "mask_embedding.pt"
# Files of a drafter's repository.
PATTERNS = [CONFIG_FILE, *WEIGHTS_PATTERNS, "README.md", MASK_FILE]
# Name of the tensor with the token ids of a reduced head.
TOKEN_IDS = "token_ids"
# Name of the offsets from rows of the head to token ids, in files of several publishers.
OFFSETS = "d2t"
# Key of a config for the length of a chain and its tokens per step on texts of the target, as
# simulated after training.
SIMULATED = "simulated"
# Largest int32, which is the token id of no model.
LAST_ID = 2**31 - 1

N = TypeVar("N", bound=nn.Module)


class Checkpoint:
    """A drafter's folder or hub repository, whose files are fetched when they are needed."""

    def __init__(self, path_or_repo: str | Path):
        self.path_or_repo = path_or_repo

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(find_checkpoint(self.path_or_repo, CONFIG_ONLY))

    @cached_property
    def folder(self) -> Path:
        return find_checkpoint(self.path_or_repo, PATTERNS)

    @cached_property
    def shapes(self) -> Shapes:
        return read_shapes(self.folder)

    def fill(
        self,
        network: N,
        sources: Mapping[str, str] | None = None,
        resolve: Callable[[dict[str, mx.array]], None] = lambda weights: None,
    ) -> N:
        """Give a new network the stored weights, quantised if they are, and return it.

        ``sources`` has the name of every stored tensor by its name in the network, by default the
        same. ``resolve`` replaces, in place, weights that this kind stores in another form.
        """
        if sources is None:
            sources = {name: name for name in self.shapes}
        stored = {own: self.shapes[name] for own, name in sources.items()}
        if "quantization" in self.config:
            quantize_as_stored(network, self.config["quantization"], stored)
        check_shapes(network, stored, self.folder, sources)
        tensors = read_tensors(self.folder)
        weights = {own: tensors[name] for own, name in sources.items()}
        resolve(weights)
        return give_weights(network, weights, self.folder, sources)


def give_weights(
    network: N, weights: dict[str, mx.array], name: str | Path, names: Mapping[str, str]
) -> N:
    """Give a network weights of the right shapes after checks of their values, and return it.

    ``names`` are those in the checkpoint ``name`` by the network's. Offsets to token ids are
    resolved in place. Waits for the device.
    """
    resolve_offsets(weights, names)
    check_floating(network, weights, name, names)
    network.load_weights(list(weights.items()))
    check_finite(network, name, names)
    check_token_ids(network, name)
    network.eval()
    mx.eval(network.parameters())
    return network


def save_drafter(
    drafter: DraftNetwork, folder: str | Path, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter so that `load_drafter` reads it back; files appear whole or not at all.

    Raises:
        CheckpointError: The files cannot be written.
        ConfigError: An argument is of another kind.
    """
    check_instance("drafter", drafter, DraftNetwork, "a network that drafts, from load_drafter")
    check_instance("folder", folder, (str, Path), "the path of a folder")
    check_instance("extra_config", extra_config, (Mapping, NoneType), "a mapping or None")
    try:
        write_drafter(drafter, Path(folder), extra_config)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {explain(error)}") from error
    except (TypeError, ValueError) as error:  # JSON has no such value, or no path such a name
        raise ConfigError(f"cannot write {folder}: {first_line(error)}") from error


def write_drafter(
    drafter: DraftNetwork, folder: Path, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Do what `save_drafter` does, but let an OSError tell what cannot be written."""
    config = drafter.stored_config()
    if (quantization := quantization_of(drafter)) is not None:
        config["quantization"] = quantization
    tensors = {drafter.stored_name(own): one for own, one in named_parameters(drafter).items()}
    write_checkpoint(folder, {**config, **(extra_config or {})}, tensors)


def collect_sources(
    names: Iterable[str], own_name: Callable[[str], str | None]
) -> tuple[dict[str, str], list[str]]:
    """Map own names of tensors to those in a checkpoint; also return names without an own one."""
    sources: dict[str, str] = {}
    others = []
    for name in names:
        own = own_name(name)
        if own is None:
            others.append(name)
        elif own in sources:
            raise CheckpointError(
                f"{quote(sources[own])} and {quote(name)} both stand for {own}; keep one of them"
            )
        else:
            sources[own] = name
    return sources, others


def check_shapes(
    network: nn.Module, stored: Shapes, folder: str | Path, names: Mapping[str, str]
) -> None:
    """Raise `CheckpointError` if `describe_misfits` finds problems."""
    if problems := describe_misfits(network, stored, names):
        raise misfit(folder, problems)


def misfit(folder: str | Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the weights in {folder} do not fit its config.json: {reason}")


def describe_misfits(network: nn.Module, stored: Shapes, names: Mapping[str, str]) -> str:
    """Name the first dozen stored tensors that are missing, unexpected or of other shapes, if any.

    ``names`` are those in the checkpoint by the network's, if they differ.
    """
    expected = {name: tensor.shape for name, tensor in named_parameters(network).items()}
    called = {name: names.get(name, name) for name in expected.keys() | stored.keys()}
    problems = [
        f"{called[name]} is missing, expected shape {list(expected[name])}"
        for name in sorted(expected.keys() - stored.keys())
    ]
    problems += [
        f"{quote(called[name])} of shape {list(stored[name])} is unexpected"
        for name in sorted(stored.keys() - expected.keys())
    ]
    problems += [
        f"{quote(called[name])} has shape {list(stored[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & stored.keys())
        if tuple(stored[name]) != tuple(expected[name])
    ]
    return join_shortened(problems, "; ")


def check_floating(
    network: nn.Module, weights: Mapping[str, mx.array], name: str | Path, names: Mapping[str, str]
) -> None:
    """Raise `CheckpointError` naming weights that are integers instead of floating-point numbers.

    Weights that other programs have quantised may have the right shapes.
    """
    parameters = named_parameters(network)
    problems = [
        f"{names[own]} is {weight.dtype}"
        for own, weight in weights.items()
        if own != TOKEN_IDS
        and mx.issubdtype(weight.dtype, mx.floating)
        != mx.issubdtype(parameters[own].dtype, mx.floating)
    ]
    if problems:
        raise CheckpointError(
            f"expected floating-point weights in {name}, found {join_shortened(problems, '; ')}; "
            "use a head that is not quantised"
        )


def check_finite(network: nn.Module, name: str | Path, names: Mapping[str, str]) -> None:
    """Raise `NonFiniteError` naming the tensors that hold NaN or infinity; waits for the device."""
    floating = {
        name: tensor
        for name, tensor in named_parameters(network).items()
        if mx.issubdtype(tensor.dtype, mx.floating)
    }
    finite = to_ints(mx.stack([mx.all(mx.isfinite(tensor)) for tensor in floating.values()]))
    found = zip(floating, finite, strict=True)
    bad = [names.get(own, own) for own, is_finite in found if not is_finite]
    if bad:
        raise NonFiniteError(
            f"the drafter {name} has NaN or infinite weights in {join_shortened(bad)}; "
            "convert or train it again, in float32 or bfloat16 if float16 overflowed"
        )


def check_token_ids(network: Any, name: str | Path) -> None:
    """Raise `CheckpointError` if two rows of the head propose one token, or one an unknown token.

    A tree would keep both of two equal siblings; an id out of range reads memory elsewhere.
    """
    if TOKEN_IDS not in network:
        return
    last, dtype = network.config.vocab_size - 1, network.token_ids.dtype
    if not mx.issubdtype(dtype, mx.integer):
        found = f"integers, found {dtype}"
    elif not 0 <= min(ids := to_ints(network.token_ids)) <= max(ids) <= last:
        found = f"ids from 0 to {last}, found {min(ids)} to {max(ids)}"
    elif len(set(ids)) < len(ids):
        found = "distinct ids, found some twice"
    else:
        return
    raise CheckpointError(f"token_ids in {name} must be {found}; convert or train it again")


def resolve_offsets(weights: dict[str, mx.array], names: Mapping[str, str]) -> None:
    """Replace offsets from rows of the head to token ids by these ids, int32, shape (V,).

    ``names`` are the published names by those of the network.
    """
    offsets = weights.get(TOKEN_IDS)
    if offsets is None or not names[TOKEN_IDS].endswith(OFFSETS):
        return
    if mx.issubdtype(offsets.dtype, mx.integer):  # `check_token_ids` refuses others
        ids = mx.arange(offsets.shape[0], dtype=mx.int64) + offsets.astype(mx.int64)
        weights[TOKEN_IDS] = mx.clip(ids, -1, LAST_ID).astype(mx.int32)


def speculative_tokens(values: Mapping[str, Any]) -> Any:
    """Return the number of drafts of the first method in a config; None if it has none."""
    methods = as_mapping(values.get("speculators_config")).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return as_mapping(first).get("speculative_tokens")

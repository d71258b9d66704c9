"""The parts of a model on several machines, by mlx-lm's own ``shard``, and what cannot be split."""

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import MODEL_REMAPPING

from mlx_redrafter.checkpoint_files import CONFIG_FILE, find_checkpoint
from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError, explain, first_line
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.model_loading import load_model
from mlx_redrafter.target.model_parts import MLX_LM_MODELS

# Files of a LoRA adapter in mlx-lm's format.
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
# Samples of a file for its digest, evenly spaced: fine-tuned weights differ in nearly all of them.
NUM_SAMPLES = 64
# Bytes of a sample, a block of a disk.
SAMPLE_BYTES = 4096
# Maximum number of rows that ranks add in their order: those of the largest trees of a batch.
# Longer messages are chunks of prompts, which are the same with drafts and without; a sum by MLX
# sends fewer bytes.
MOST_ROWS = 512

_stock_sum = mx.distributed.all_sum


def digests(name: str, adapter: str | None = None) -> dict[str, str]:
    """Return digests of the files of a model and of a LoRA adapter on this machine, by file name.

    Raise `CheckpointError` if this machine lacks one of them.
    """
    folder = find_checkpoint(name, [CONFIG_FILE])
    paths = [folder / CONFIG_FILE, *folder.glob("*.safetensors")]
    if adapter is not None:
        paths += [Path(adapter) / file for file in ADAPTER_FILES]
    try:
        return {path.name: _digest(path) for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {explain(error)}") from error


def _digest(path: Path) -> str:
    """Return a digest of a file's size and samples, which are the whole of a small file."""
    size, found = path.stat().st_size, hashlib.sha256()
    found.update(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, max(SAMPLE_BYTES, size // NUM_SAMPLES)):
            file.seek(start)
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def check_family(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedTargetError` if, by its config, mlx-lm cannot split a model."""
    name = config["model_type"]
    if not _can_shard(MODEL_REMAPPING.get(name, name)):
        known = ", ".join(one for one in SUPPORTED if _can_shard(one))
        raise UnsupportedTargetError(
            f"model_type {name!r} cannot be split over machines by mlx-lm; start one machine "
            f"alone, or use one of these: {known}"
        )


def load_part(
    name: str,
    group: Any,
    tokenizer_config: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load this rank's part of a model and its tokenizer; blocks until the weights are read.

    mlx-lm cannot split an adapter's layers. They are fused in the dtype of the model, which are
    the weights of ``mlx_lm.fuse --dequantize``.
    """
    model, tokenizer = load_model(name, tokenizer_config, adapter, lazy=True)
    adapted = [(path, one) for path, one in model.named_modules() if hasattr(one, "fuse")]
    model.update_modules(tree_unflatten([(path, one.fuse(True)) for path, one in adapted]))
    split(model, group)
    mx.eval(model.parameters())
    return model, tokenizer


def split(model: nn.Module, group: Any) -> None:
    """Keep this rank's part of a model whose weights are not read yet.

    Raise `UnsupportedTargetError` if mlx-lm cannot split it, or if its heads do not divide: mlx-lm
    would leave out some of them without a word.
    """
    size, before = group.size(), list(_sizes(model))
    try:
        model.shard(group)
    except Exception as error:  # of shapes that do not divide, or of mlx-lm's own
        raise UnsupportedTargetError(
            f"mlx-lm cannot split this model over {size} machines: {first_line(error)}; start "
            "fewer machines, or one alone"
        ) from error
    for module, name, whole in before:
        part = getattr(module, name, whole)
        # Some families copy key heads to several machines if there are too few.
        if part != whole and part * size != whole and not (part == 1 and size % whole == 0):
            raise UnsupportedTargetError(
                f"expected a model that divides by {size} machines, found {whole} {name}; start "
                "a number of machines that divides it, or one alone"
            )
    if size > 2:  # two ranks have no order: a + b is b + a
        mx.distributed.all_sum = _sum_in_rank_order


def _sum_in_rank_order(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """Add the arrays of all ranks, rank 0 first, in place of ``mx.distributed.all_sum``.

    MLX's ring adds each part of a message beginning with another rank. So a node of a tree would be
    rounded differently from the same token alone, and a drafted text would not be the plain one.
    """
    if x.ndim == 0 or x.size > MOST_ROWS * x.shape[-1]:
        return _stock_sum(x, group=group, stream=stream)
    first, *rest = mx.distributed.all_gather(x[None], group=group, stream=stream)
    return sum(rest, start=first)


def has_split_head(model: nn.Module) -> bool:
    """Whether every rank computes a part of the logits only, which they then gather."""
    kinds = AllToShardedLinear, QuantizedAllToShardedLinear
    return any(isinstance(one.get("lm_head"), kinds) for one in model.modules())


def _can_shard(model_file: str) -> bool:
    return hasattr(importlib.import_module(MLX_LM_MODELS + model_file).Model, "shard")


def _sizes(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """List all integers that modules keep beside their weights, such as numbers of heads."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield module, name, value

"""Loading of a target and its proposer, with the cheap checks first."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.checkpoints.bundled import expand_name, find_bundled
from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, is_auto
from mlx_redrafter.checkpoints.recognition import find_kind
from mlx_redrafter.checks import check_instance
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.kernels.trials import use_kernels
from mlx_redrafter.machines.agreement import load_together
from mlx_redrafter.machines.following import follow
from mlx_redrafter.machines.leading import target_of
from mlx_redrafter.machines.meeting import meet
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
from mlx_redrafter.proposers.kind import UNKNOWN, TargetFacts
from mlx_redrafter.target.model_loading import load_model
from mlx_redrafter.target.model_parts import check_config
from mlx_redrafter.target.target import Target
from mlx_redrafter.thread_streams import end_streams_with_thread

logger = logging.getLogger(__name__)

# Word for prompt lookup, which needs no files.
LOOKUP = "lookup"


def load(
    path_or_repo: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    kernels: bool = True,
    tune: bool = True,
    group: Any = None,
) -> tuple[nn.Module, TokenizerWrapper, Proposer | None]:
    """Load a model with mlx-lm, and a drafter for it.

    It fetches and checks both configs before any weights. Weights keep their stored dtype, except
    the bundled model's, which are stored in float16 to be small and returned in float32. On a CPU
    float16 is several times slower. On a GPU its kernels for one and for several tokens may round
    differently, and in float32 far fewer tokens are near enough to a tie for that to matter. The
    drafter of a float32 model is returned in float32, too.

    Args:
        path_or_repo: The model: a folder, or a repository on the Hugging Face Hub; None for the
            bundled one.
        drafter: Likewise a folder or a repository, of a drafter of any kind in `proposers` or of a
            smaller model with the same token ids. Or the name of a drafter in the package, such as
            "smollm2-135m-instruct". "mtp" stands for the module in the model's own files, "lookup"
            for prompt lookup. "auto" finds a drafter on this machine that was made for the model,
            else a much smaller model with the same tokens, else prompt lookup. None loads none. The
            bundled model has the bundled drafter for None and "auto".
        tokenizer_config: Extra options for the tokenizer.
        adapter_path: Folder of a LoRA adapter for the model, whose layers are fused on several
            machines, as ``mlx_lm.fuse --dequantize`` does.
        trust_remote_code: Whether mlx-lm and the tokenizer may run code from the checkpoint.
        kernels: Whether quantised layers and attention may verify trees with kernels of this
            package, on Apple GPUs, if a trial shows the bits of MLX's own and no more time.
        tune: Whether a recurrent drafter is returned in 8 bits if it drafts faster so on this
            machine, and a quantised one unpacked on a CPU.
        group: Ranks to split the model over, as from ``mx.distributed.init()``: rank 0 decodes,
            with drafts of its own. On every other rank this function never returns: it does what
            rank 0 says, and ends the process when rank 0 ends.

    Returns:
        The stock mlx-lm model, its tokenizer, and the drafter or None; all weights in memory, so
        that any thread may use them.

    Raises:
        CheckpointError: A checkpoint is missing or damaged, or the drafter is for another model; or
            another rank has another model.
        ConfigError: "auto", "lookup" or "mtp" is a folder as well, or the model has no such module;
            or an option is not for several machines.
        NonFiniteError: The drafter's weights are not finite.
        UnsupportedTargetError: Trees of this architecture would not be decoded exactly, or the
            model cannot be split over so many machines.
    """
    end_streams_with_thread()
    _check_options(tokenizer_config, adapter_path, group)
    machines = None if group is None or group.size() == 1 else meet(group)
    adapter = None if adapter_path is None else str(adapter_path)
    if machines is not None:
        if not machines.leads:
            follow(machines, None if path_or_repo is None else str(path_or_repo), adapter)
        _check_for_machines(path_or_repo, trust_remote_code)
    is_bundled = path_or_repo is None
    if path_or_repo is None:
        path_or_repo = find_bundled("target")
        drafter = find_bundled("drafter") if drafter is None or is_auto(drafter) else drafter
    name = str(path_or_repo)
    config = read_config(find_checkpoint(name, CONFIG_ONLY))
    check_config(config)
    if adapter_path is not None and not (Path(adapter_path) / "adapter_config.json").is_file():
        raise CheckpointError(
            f"no such adapter folder: {adapter_path}; give one with adapter_config.json"
        )
    drafter = _find_drafter(name) if is_auto(drafter) else drafter
    drafter = expand_name(drafter) if isinstance(drafter, str) else drafter
    kind = None if drafter is None else find_kind(drafter, name)
    proposer: Proposer | None = None
    if kind is not None and drafter is not None:
        proposer = kind.load(drafter, TargetFacts.of(name, config))
    if machines is None:
        model, tokenizer = load_model(name, tokenizer_config, adapter_path, trust_remote_code)
    else:
        model, tokenizer = load_together(machines, name, config, tokenizer_config, adapter)
    if is_bundled:
        model.set_dtype(mx.float32)
    # MLX computes weights that were cast here: another thread could not.
    mx.eval(model.parameters())
    target = target_of(model)
    if proposer is not None:
        _fit(proposer, target, tokenizer)
    if kernels:
        use_kernels(model)
    if tune and kind is not None and hasattr(kind, "tune"):
        proposer = kind.tune(proposer, target)
    return model, tokenizer, proposer


def _check_options(tokenizer_config: object, adapter_path: object, group: object) -> None:
    check_instance("tokenizer_config", tokenizer_config, (Mapping, NoneType), "a mapping or None")
    check_instance("adapter_path", adapter_path, (str, Path, NoneType), "a folder or None")
    expected = "a group of mx.distributed.init() or None"
    check_instance("group", group, (mx.distributed.Group, NoneType), expected)


def _fit(proposer: Proposer, target: Target, tokenizer: TokenizerWrapper) -> None:
    """Check that a drafter is for a target, and give it float32 if the target has that."""
    proposer.check_fit(target, tokenizer)
    for network in proposer.networks if target.modules.dtype == mx.float32 else ():
        network.set_dtype(mx.float32)
        mx.eval(network.parameters())


def _find_drafter(model: str) -> str:
    """Find a drafter on this machine for a model; prompt lookup if there is none."""
    search = DrafterSearch.of(model)
    found = search.stored() or search.draft_model()
    chosen = LOOKUP if found is None else found.option
    logger.info("drafter of %s: %s", model, chosen)
    return chosen


def _check_for_machines(name: str | Path | None, trust_remote_code: bool) -> None:
    if name is None:
        raise ConfigError(
            "expected a model to split over several machines, found none; the bundled one is for "
            "one machine, so name another"
        )
    if trust_remote_code:
        raise ConfigError("trust_remote_code is not supported on several machines; leave it out")


def load_drafter(path_or_repo: str | Path) -> Proposer:
    """Load a drafter of any kind as it is stored, without its target.

    Raise `CheckpointError` if files are missing, truncated or foreign, or a value is out of range,
    and `NonFiniteError` for a weight that is NaN or infinite.
    """
    return find_kind(path_or_repo).load(path_or_repo, UNKNOWN)

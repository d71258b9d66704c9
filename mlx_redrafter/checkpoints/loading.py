"""Loading a target and its drafter; whatever can be checked cheaply is checked first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config, read_shapes
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.recognition import CONFIG_ONLY, LOOKUP, MTP, is_word, recognise
from mlx_redrafter.errors import CheckpointError, first_line
from mlx_redrafter.kernels.selection import use_kernels
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.eagle.checkpoint import load_eagle
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kinds import as_proposer
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.medusa.checkpoint import load_medusa
from mlx_redrafter.proposers.medusa.proposer import MedusaProposer
from mlx_redrafter.proposers.mtp.checkpoint import load_mtp
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.redrafter.checkpoint import load_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.precision import choose_precision
from mlx_redrafter.proposers.redrafter.proposer import check_sizes
from mlx_redrafter.proposers.specformer.checkpoint import load_specformer
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.target.model_parts import check_config
from mlx_redrafter.target.target import Target
from mlx_redrafter.thread_streams import end_streams_with_thread

LoadedDrafter = Drafter | Eagle | MedusaProposer | Mtp | SpecFormer | DraftModel | Lookup


def load(
    path_or_repo: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    kernels: bool = True,
) -> tuple[nn.Module, TokenizerWrapper, LoadedDrafter | None]:
    """Load a model with mlx-lm, and what drafts for it.

    Both configs are fetched and checked before any weights are. Weights keep the dtype they are
    stored in, except the bundled model's, which are stored in float16 to be small and returned in
    float32. On a CPU float16 is several times slower; on a GPU its kernels for one and for several
    tokens may round differently, and in float32 far fewer tokens are near enough to a tie for that
    to matter. What the bundled model writes is what stock mlx-lm writes with it in float32. What
    drafts for a float32 model is returned in float32 too, and a drafter that drafts faster in 8
    bits on this device is returned so; `load_drafter` reads one as it is stored.

    Args:
        path_or_repo: The model: a folder, or a repository on the Hugging Face Hub; None is the
            bundled one.
        drafter: A recurrent drafter, an EAGLE head, Medusa heads, an MTP module, a SpecFormer or a
            smaller model of the same token ids, likewise a folder or a repository; "mtp" for the
            module in the model's own files, or "lookup" for drafts out of the text itself. None
            loads none, or the bundled drafter for the bundled model.
        tokenizer_config: Extra options for the tokenizer.
        adapter_path: Folder of a LoRA adapter for the model.
        trust_remote_code: Whether mlx-lm and the tokenizer may run code from the checkpoint.
        kernels: Whether quantised layers and attention may verify trees with kernels of this
            package, on Apple GPUs, where a trial shows the bits of MLX's own and no more time.

    Returns:
        The stock mlx-lm model, its tokenizer, and the drafter or None; all weights in memory, so
        that any thread may use them.

    Raises:
        CheckpointError: A checkpoint is missing or damaged, or the drafter is for another model.
        ConfigError: "lookup" or "mtp" is a folder as well, or the model has no such module.
        NonFiniteError: The drafter's weights are not finite.
        UnsupportedTargetError: Trees of this architecture would not be decoded exactly.
    """
    end_streams_with_thread()
    is_bundled = path_or_repo is None
    if path_or_repo is None:
        path_or_repo = find_bundled("target")
        drafter = find_bundled("drafter") if drafter is None else drafter
    name = str(path_or_repo)
    config = read_config(find_checkpoint(name, CONFIG_ONLY))
    check_config(config)
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise CheckpointError(f"no such adapter folder: {adapter_path}")
    loaded: LoadedDrafter | None = None
    if drafter is not None:
        loaded = _load_drafter(drafter, name, config)
    options = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
    model, tokenizer = _load_model(name, options, adapter_path, trust_remote_code)
    if is_bundled:
        model.set_dtype(mx.float32)
    # Weights that were cast are computed here: another thread could not.
    mx.eval(model.parameters())
    target = Target(model)
    if loaded is not None:
        proposer = as_proposer(loaded)
        proposer.check_fit(target, tokenizer)
        for module in proposer.modules if target.dtype == mx.float32 else ():
            module.set_dtype(mx.float32)
            mx.eval(module.parameters())
    if kernels:
        use_kernels(model)
    if isinstance(loaded, Drafter):
        loaded = choose_precision(loaded, target)
    return model, tokenizer, loaded


def _load_model(
    name: str,
    tokenizer_config: Mapping[str, Any],
    adapter_path: str | Path | None,
    trust_remote_code: bool,
) -> tuple[nn.Module, TokenizerWrapper]:
    folder = find_checkpoint(name, DEFAULT_ALLOW_PATTERNS)
    read_shapes(folder)  # names a truncated file before memory is spent
    try:
        model, tokenizer, *_ = mlx_lm.load(
            str(folder),
            tokenizer_config=dict(tokenizer_config),
            adapter_path=None if adapter_path is None else str(adapter_path),
            trust_remote_code=trust_remote_code,
        )
        model(mx.array([[0]]))  # never computed: it tells whether the parts fit together
    except Exception as error:  # what is made of damaged files may raise anything
        raise CheckpointError(
            f"mlx-lm cannot load {name}: {first_line(error)}; download or convert it again"
        ) from error
    return model, tokenizer


def _load_drafter(drafter: str | Path, name: str, target: Mapping[str, Any]) -> LoadedDrafter:
    """Load what drafts for a target of this name and config, once its own has been checked."""
    if is_word(drafter, LOOKUP):
        return Lookup()
    if is_word(drafter, MTP):
        return load_mtp(name)
    kind, config = recognise(drafter)
    text_config = target.get("text_config")
    values = text_config if isinstance(text_config, Mapping) else target
    if kind == "draft model":
        # A repository's code is trusted for the target alone.
        model, tokenizer = _load_model(str(drafter), {}, None, trust_remote_code=False)
        return DraftModel(model, tokenizer)
    if kind == "MTP module":
        return load_mtp(drafter)
    vocab_size = values.get("vocab_size")
    sizes = values.get("hidden_size"), vocab_size if isinstance(vocab_size, int) else None
    if kind == "Medusa heads":
        return MedusaProposer(load_medusa(drafter, lambda heads: check_sizes(heads, *sizes)))
    if kind in ("EAGLE head", "SpecFormer"):
        network = load_eagle(drafter) if kind == "EAGLE head" else load_specformer(drafter)
        check_sizes(network.config, *sizes)
        return network
    check_sizes(DrafterConfig.from_dict(config), *sizes)
    return load_drafter(drafter)

"""Export of an MLX drafter in the layout that Apple's PyTorch code loads."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from mlx_redrafter.checkpoint_files import named_parameters, shared_name, write_checkpoint
from mlx_redrafter.convert.publication import PROVENANCE_KEY, check_output, publish
from mlx_redrafter.convert.recurrent import APPLE_TOP_K
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE, DrafterConfig
from mlx_redrafter.version import __version__

# Keys of config.json for values that no tensor shape determines, and that Apple's code ignores.
KEPT_KEYS = ("draft_top_k", "score_scale", "noise_share")


def export_drafter(
    path_or_repo: str | Path, destination: Path, dtype: str | None = None, overwrite: bool = False
) -> tuple[str, ...]:
    """Write an MLX drafter as the ``config.json`` and ``model.safetensors`` of Apple's code.

    Return notes on the result, for the user. Quantised weights are dequantised; without a dtype
    they keep the drafter's. ``destination`` and ``overwrite`` are as in `convert_drafter`.
    """
    check_output(destination, path_or_repo, overwrite=overwrite)
    drafter = load_drafter(path_or_repo)
    _check_expressible(drafter.config)
    target_dtype: mx.Dtype = drafter.dtype if dtype is None else getattr(mx, dtype)
    parameters = named_parameters(dequantize_model(drafter))
    tensors = {name: tensor.astype(target_dtype) for name, tensor in parameters.items()}
    with publish(destination) as staging:
        config = _make_apple_config(drafter.config, target_dtype, shared_name(path_or_repo))
        write_checkpoint(staging, config, tensors, framework="pt")
    kept = drafter.config.draft_top_k or drafter.config.vocab_size
    if kept == min(APPLE_TOP_K, drafter.config.vocab_size):
        return ()
    return (
        f"Apple's code keeps {APPLE_TOP_K} logits per draft, this drafter keeps {kept}; "
        "its scores will differ a little there",
    )


def _check_expressible(config: DrafterConfig) -> None:
    reasons = []
    if config.rnn and (config.rnn_activation != "silu" or not config.rnn_first_step_bias):
        reasons.append("TensorRT-LLM's recurrence, which Apple's code does not support")
    if config.draft_vocab_size is not None:
        reasons.append(f"a head of {config.draft_vocab_size} out of {config.vocab_size} tokens")
    if reasons:
        raise CheckpointError(
            f"the drafter has {' and '.join(reasons)}; export the drafter it was made from"
        )


def _make_apple_config(config: DrafterConfig, dtype: mx.Dtype, source: str) -> dict[str, Any]:
    return {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,  # required by Apple's config class, never read
        "rnn": config.rnn,
        # Apple's code reads none of these; `convert` finds them when the drafter comes back.
        **{key: value for key, value in config.to_dict().items() if key in KEPT_KEYS},
        "torch_dtype": str(dtype).removeprefix("mlx.core."),
        PROVENANCE_KEY: {"source": source, "converter": f"mlx_redrafter {__version__}"},
    }

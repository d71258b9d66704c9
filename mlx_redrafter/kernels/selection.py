"""Try this package's kernels on a model at load, and use those that qualify."""

import logging
import os

import mlx.nn as nn

from mlx_redrafter.kernels.attention import AttentionChoice, attention_shapes, use_attention
from mlx_redrafter.kernels.attention_trials import AttentionTrial
from mlx_redrafter.kernels.layers import is_available, layers_by_shape
from mlx_redrafter.kernels.product_trials import ProductTrial

logger = logging.getLogger(__name__)

# Environment variable that turns kernels off with "0".
SWITCH = "MLX_REDRAFTER_KERNELS"


def try_kernels(model: nn.Module) -> list[ProductTrial | AttentionTrial]:
    """Try the kernels for every shape of a model's matrices, then of its attention."""
    products = [ProductTrial(*alike) for alike in layers_by_shape(model).items()]
    attentions = [AttentionTrial(*alike) for alike in attention_shapes(model).items()]
    return [*products, *attentions]


def use_kernels(model: nn.Module) -> None:
    """Let a model use the kernels that are equal to MLX's, and faster or, for attention, as fast.

    Does nothing without an Apple GPU, or if the environment variable `SWITCH` is 0. The first model
    of its shapes on a machine costs some seconds.
    """
    if not is_available() or os.environ.get(SWITCH) == "0":
        return
    trials = try_kernels(model)
    failed = [trial for trial in trials if trial.failure]
    if failed:
        logger.warning(
            "MLX's kernels are used for %d of %d shapes: for %s, %s; "
            "`redrafter-mlx check --kernels` shows all",
            len(failed),
            len(trials),
            failed[0].shape,
            failed[0].failure,
        )
    choices = []
    for trial in trials:
        if isinstance(trial, ProductTrial):
            trial.use()
        elif trial.equal and trial.rows:
            choices.append(AttentionChoice(trial.shape, trial.equal, trial.rows))
    if choices:
        use_attention(model, choices)

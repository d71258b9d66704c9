"""MTP modules: a layer that a model was trained with, and mlx-lm leaves out."""

from pathlib import Path

import mlx.core as mx

from mlx_redrafter.errors import first_line
from mlx_redrafter.proposers.checkpoint import give_weights, misfit
from mlx_redrafter.proposers.kind import UNKNOWN, TargetFacts
from mlx_redrafter.proposers.mtp.families import is_mtp
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.mtp.tensors import find_module, open_module

NAME = "MTP module"
# Word for the module in the target's own files.
WORD = "mtp"
recognise = is_mtp


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Mtp:
    """Load a model's MTP module, the first one if it has several.

    Of the model's folder or repository only the files are fetched that its index names for the
    module. A folder may also have its ``config.json`` and its MTP tensors alone. `WORD` stands for
    the target's own files.
    """
    if path_or_repo == WORD and target.name is not None:
        path_or_repo = target.name
    folder, paths = find_module(path_or_repo)
    module, weights, names = open_module(folder, paths)
    target.check(module.config)
    try:
        mx.eval(list(weights.values()))
    except Exception as error:  # computing on damaged files may raise anything
        raise misfit(folder, first_line(error)) from error
    return give_weights(module, weights, folder, names)

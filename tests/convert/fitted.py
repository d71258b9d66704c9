"""Drafters that know what their target writes, saved as published code saves them.

Their blocks do nothing, and their final layers solve for the tokens by least squares.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.convert.export import export_drafter
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.target.target import Target
from tests.helpers.medusa import random_medusa
from tests.helpers.models import random_drafter


def fit_drafter(target: Target, texts: Sequence[ReadSequence], folder: Path) -> None:
    """Fit an RNN drafter to two tokens ahead and save it in the layout of Apple's code."""
    hidden_states, roots, firsts, seconds = _examples(texts)
    drafter = random_drafter(target.vocab_size, target.hidden_size)
    inputs = [drafter.project_input(target.modules.embed(ids)) for ids in (roots, firsts)]
    state = drafter.start(inputs[0])
    states = mx.concatenate([state, drafter.advance(state, inputs[1])])
    seen = mx.concatenate([mx.concatenate([hidden_states] * 2), states], axis=-1)
    _solve(drafter.lm_head, seen, mx.concatenate([firsts, seconds]))
    save_drafter(drafter, folder / "mlx")
    export_drafter(folder / "mlx", folder / "apple")


def fit_medusa(target: Target, texts: Sequence[ReadSequence], folder: Path) -> None:
    """Fit two Medusa heads and save them in the layout of FasterDecoding's code."""
    hidden_states, _, *wanted = _examples(texts)
    heads = random_medusa(target.vocab_size, target.hidden_size, 2)
    for number, tokens in enumerate(wanted, start=1):
        some = len(tokens) // number  # the second head knows half as much
        _solve(heads.heads[number - 1], hidden_states[:some], tokens[:some])
    folder.mkdir()
    tensors = {n.removeprefix("heads."): t for n, t in named_parameters(heads).items()}
    mx.save_safetensors(str(folder / "medusa_lm_head.safetensors"), tensors)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "stories"}
    (folder / "config.json").write_text(json.dumps(config))


def _examples(texts: Sequence[ReadSequence]) -> list[mx.array]:
    """Hidden states, and the three tokens after each."""
    parts = [(t.states[:-2], t.tokens[1:-2], t.tokens[2:-1], t.tokens[3:]) for t in texts]
    return [mx.concatenate(list(rows)) for rows in zip(*parts, strict=True)]


def _solve(layers: Any, seen: mx.array, tokens: mx.array) -> None:
    block, final = layers
    block.linear.weight, block.linear.bias = 0 * block.linear.weight, 0 * block.linear.bias
    inputs, wanted = np.array(seen), 12 * np.eye(final.weight.shape[0])[np.array(tokens)]
    ridge = inputs.T @ inputs + 1e-2 * np.eye(inputs.shape[1])
    final.weight = mx.array(np.linalg.solve(ridge, inputs.T @ wanted), mx.float32).T

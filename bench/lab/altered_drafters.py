"""Drafters made worse on purpose, and a pair whose drafter knows three of four next tokens.

    python -m mlx_redrafter.bench.lab.altered_drafters TOKENIZER TARGET DRAFTER

writes that pair: a float32 Llama of 0.2B parameters, and a small Llama as its draft model. In both,
the next token depends on the newest one alone. The drafter's other scores are noise.

Axes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs

from mlx_redrafter.bench.lab.widen import copy_tokenizer
from mlx_redrafter.checkpoint_files import named_parameters, read_config, write_checkpoint
from mlx_redrafter.convert.publication import publish
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter

# Factor of the scores of a drafter that is less sure than it should be.
FLAT = 0.3
# Factor of the scores of a drafter that is surer than it should be.
SHARP = 3.0
# Standard deviation of the noise in the weights of a badly trained drafter, in those of a weight.
NOISE = 0.25
# Share of next tokens that the synthetic drafter knows.
KNOWN = 0.75
# Logit of the next token in the synthetic pair; the other logits are noise.
CLEAR = 9.2

Ids = npt.NDArray[np.intp]


def _scale(drafter: Drafter, factor: float) -> None:
    drafter.lm_head[-1].weight = drafter.lm_head[-1].weight * factor


def _add_noise(drafter: Drafter) -> None:
    mx.random.seed(0)

    def noisy(weight: mx.array) -> mx.array:
        return weight + NOISE * mx.std(weight) * mx.random.normal(weight.shape, weight.dtype)

    drafter.update(tree_map(noisy, drafter.parameters()))


# Changes to a recurrent drafter, in place.
CHANGES: Mapping[str, Callable[[Drafter], object]] = {
    "flat": lambda drafter: _scale(drafter, FLAT),
    "sharp": lambda drafter: _scale(drafter, SHARP),
    "noisy": _add_noise,
    "4 bits": lambda drafter: quantize_drafter(drafter, 4, 64),
}


def write_synthetic_pair(tokenizer: Path, target: Path, drafter: Path) -> None:
    """Write the pair.

    Args:
        tokenizer: Folder of a Llama with the tokenizer and the vocabulary of the pair.
        target: Folder to write.
        drafter: Folder to write.
    """
    config = read_config(tokenizer)
    rng = np.random.default_rng(0)
    following = rng.permutation(config["vocab_size"])
    drafted = following.copy()
    unknown = np.flatnonzero(rng.random(len(drafted)) >= KNOWN)
    drafted[unknown] = drafted[np.roll(unknown, 1)]
    for folder, hidden, layers, ids in ((target, 1024, 16, following), (drafter, 64, 1, drafted)):
        shape = {
            "hidden_size": hidden,
            "intermediate_size": 2816 * hidden // 1024,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "head_dim": 64,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        _write_model({**config, **shape}, ids, folder, tokenizer)


def _write_model(config: dict[str, Any], following: Ids, folder: Path, tokenizer: Path) -> None:
    """Write a Llama whose layers add nothing, and whose head names the token that follows."""
    model = Model(ModelArgs.from_dict(config))
    rng = np.random.default_rng(config["hidden_size"])
    table = rng.standard_normal((len(following), config["hidden_size"]), dtype=np.float32)
    head = np.empty_like(table)
    head[following] = CLEAR * table / np.square(table).mean(axis=1, keepdims=True)
    given = {"model.embed_tokens.weight": table, "lm_head.weight": head / table.shape[1]}
    weights = {}
    for name, weight in named_parameters(model).items():
        if name in given:
            weights[name] = mx.array(given[name])
        else:
            adds = "o_proj" in name or "down_proj" in name
            weights[name] = (mx.zeros_like(weight) if adds else weight).astype(mx.float32)
    with publish(folder) as staging:
        write_checkpoint(staging, config, weights)
        copy_tokenizer(tokenizer, staging)


if __name__ == "__main__":
    write_synthetic_pair(*map(Path, sys.argv[1:]))

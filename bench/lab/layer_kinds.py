"""Copies of a widened Llama with other kinds of layers, at the same cost, for the same drafters.

    python -m mlx_redrafter.bench.lab.layer_kinds windows WIDENED COPY
    python -m mlx_redrafter.bench.lab.layer_kinds hybrid WIDENED COPY

``windows`` lets two of three layers attend to a window. ``hybrid`` replaces the layers that the
widening has added, and which do nothing, by Mamba-2 layers that do nothing either, each before a
layer that does something. So a hybrid writes the text of the widened model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.bench.lab.widen import copy_tokenizer
from mlx_redrafter.checkpoint_files import (
    named_parameters,
    read_config,
    read_tensors,
    write_checkpoint,
)
from mlx_redrafter.convert.publication import check_output, publish
from mlx_redrafter.target.model_loading import make_model

# Tokens of a window: fewer than a prompt of these measurements and its text have.
WINDOW = 64
# Size of a Mamba-2 head, as in Granite 4.0.
HEAD_SIZE = 64
# Size of a head's state per number of its input, as there.
STATE_SIZE = 128


def with_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Change the config of a Llama so that two of three layers attend to a window."""
    count = config["num_hidden_layers"]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return {
        **config,
        "sliding_window": WINDOW,
        "layer_types": [kinds[i % len(kinds)] for i in range(count)],
    }


def with_states(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[int | None]]:
    """Make the config of a hybrid.

    Returns:
        The config, and for each layer the number of the widened model's layer that it copies; None
        for a layer with a state.
    """
    count, num_trained = config["num_hidden_layers"], config["widened_from"]["num_hidden_layers"]
    copied: list[int | None] = []
    for number in range(num_trained):
        ends = (count - num_trained) * (number + 1) // num_trained
        copied += [None] * (ends - copied.count(None)) + [number]
    values = {
        **config,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": config["head_dim"] ** -0.5,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba" if one is None else "attention" for one in copied],
        "mamba_n_heads": 2 * config["hidden_size"] // HEAD_SIZE,
        "mamba_d_head": HEAD_SIZE,
        "mamba_d_state": STATE_SIZE,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    return values, copied


def hybrid_weights(
    config: Mapping[str, Any], copied: list[int | None], tensors: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Place the weights of a widened model in its hybrid; all others are random, outputs zero."""
    mx.random.seed(0)
    model: nn.Module = make_model("a hybrid", config)
    weights = named_parameters(model)
    for name in weights:
        if not name.startswith("model.layers."):
            weights[name] = tensors[name]
            continue
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        source = copied[int(number)]
        if source is not None:
            weights[name] = tensors[f"model.layers.{source}.{rest}"]
        elif rest in ("mamba.out_proj.weight", "mlp.down_proj.weight"):
            weights[name] = mx.zeros_like(weights[name])
    return weights


def main() -> None:
    """Parse the options and write the copy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["windows", "hybrid"])
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    given = parser.parse_args()
    check_output(given.destination, given.source)
    config, tensors = read_config(given.source), read_tensors(given.source)
    if given.kind == "windows":
        config = with_windows(config)
    else:
        config, copied = with_states(config)
        tensors = hybrid_weights(config, copied, tensors)
    with publish(given.destination) as staging:
        write_checkpoint(staging, config, dict(tensors))
        copy_tokenizer(given.source, staging)


if __name__ == "__main__":
    main()

"""Drafters fitted to a small trained target within seconds, saved as published code saves them.

Axes: B windows, S tokens, H hidden size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.convert.export import export_drafter
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.hooks import captured
from mlx_redrafter.target.target import Target

NUM_WINDOWS, WINDOW, NUM_STEPS, BATCH = 96, 128, 250, 256


class Examples(NamedTuple):
    """What a drafter sees at many positions, and what the target says next (its argmax)."""

    hidden_states: mx.array  # (B, H)
    roots: mx.array  # (B,)
    firsts: mx.array  # (B,)
    seconds: mx.array  # (B,)


def fit_drafter(model: nn.Module, tokenizer: Any, text: Path, folder: Path) -> None:
    """Fit an RNN drafter to two tokens ahead and save it in the layout of Apple's code."""
    target = Target(model)
    examples = _examples(model, tokenizer, text)
    config = DrafterConfig(target.vocab_size, target.hidden_size, 2 * target.hidden_size, 1, True)
    mx.random.seed(0)
    drafter = Drafter(config)

    def loss(batch: Examples) -> mx.array:
        state = drafter.start(drafter.project_input(target.modules.embed(batch.roots)))
        total = nn.losses.cross_entropy(drafter.logits(batch.hidden_states, state), batch.firsts)
        state = drafter.advance(state, drafter.project_input(target.modules.embed(batch.firsts)))
        total += nn.losses.cross_entropy(drafter.logits(batch.hidden_states, state), batch.seconds)
        return total.mean()

    _train(drafter, loss, examples, NUM_STEPS)
    save_drafter(drafter, folder / "mlx")
    export_drafter(folder / "mlx", folder / "apple")


def fit_medusa(model: nn.Module, tokenizer: Any, text: Path, folder: Path) -> None:
    """Fit two Medusa heads and save them in the layout of FasterDecoding's code."""
    target = Target(model)
    examples = _examples(model, tokenizer, text)
    mx.random.seed(0)
    heads = Medusa(MedusaConfig(target.vocab_size, target.hidden_size, 2, 1))

    def loss(batch: Examples) -> mx.array:
        wanted = batch.firsts, batch.seconds
        logits = (heads.logits(batch.hidden_states, head) for head in range(2))
        return sum(map(nn.losses.cross_entropy, logits, wanted), mx.zeros(())).mean()

    _train(heads, loss, examples, NUM_STEPS // 2)
    folder.mkdir()
    tensors = {n.removeprefix("heads."): t for n, t in named_parameters(heads).items()}
    mx.save_safetensors(str(folder / "medusa_lm_head.safetensors"), tensors)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "stories"}
    (folder / "config.json").write_text(json.dumps(config))


def _train(
    network: nn.Module, loss: Callable[[Examples], mx.array], examples: Examples, num_steps: int
) -> None:
    random = np.random.default_rng(0)
    optimizer = optim.Adam(3e-3)
    step = nn.value_and_grad(network, loss)
    for _ in range(num_steps):
        rows = mx.array(random.integers(0, len(examples.roots), BATCH))
        _, gradients = step(Examples(*(array[rows] for array in examples)))
        optimizer.update(network, gradients)
        mx.eval(network.parameters(), optimizer.state)


def _examples(model: nn.Module, tokenizer: Any, text: Path) -> Examples:
    """Positions whose next two tokens in the text are what the target itself would say."""
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines(keepends=True):
        ids += tokenizer.encode(line, add_special_tokens=False)
        if len(ids) >= NUM_WINDOWS * WINDOW:
            break
    windows = mx.array(ids[: NUM_WINDOWS * WINDOW]).reshape(NUM_WINDOWS, WINDOW)
    with captured() as outputs:
        said = mx.argmax(model(windows), axis=-1)  # (B, S): token s + 1 as the target has it
    hidden_states = outputs[-1]
    return Examples(
        hidden_states[:, :-3].reshape(-1, hidden_states.shape[-1]),
        windows[:, 1:-2].flatten(),
        said[:, 1:-2].flatten(),
        said[:, 2:-1].flatten(),
    )

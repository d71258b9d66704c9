"""SpecFormer against its published equations in torch, whatever the steps before, and its files."""

from __future__ import annotations

import json
import random
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mlx_redrafter import generate  # noqa: E402
from mlx_redrafter.checkpoint_files import named_parameters  # noqa: E402
from mlx_redrafter.checkpoints.recognition import recognise  # noqa: E402
from mlx_redrafter.device_read import to_ints  # noqa: E402
from mlx_redrafter.draft_plan import DraftPlan  # noqa: E402
from mlx_redrafter.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    NonFiniteError,
    UnsupportedTargetError,
)
from mlx_redrafter.proposers.checkpoint import save_drafter  # noqa: E402
from mlx_redrafter.proposers.quantization import quantize_drafter  # noqa: E402
from mlx_redrafter.proposers.specformer import load as load_specformer  # noqa: E402
from mlx_redrafter.proposers.specformer.config import SpecFormerConfig  # noqa: E402
from mlx_redrafter.proposers.specformer.network import SpecFormer  # noqa: E402
from mlx_redrafter.target.target import Target  # noqa: E402
from tests.helpers.flights import drafts_after_any_steps  # noqa: E402
from tests.helpers.models import tiny_llama, wrapped_tokenizer  # noqa: E402
from tests.models.tiny_models import build, tiny_config  # noqa: E402

VOCAB, HIDDEN, WIDTH, SLOTS, HEADS, EPS = 64, 32, 48, 4, 4, 1e-6
LAYERS = (0, 1, 1, -1)
TOLERANCE = 2e-5
MODEL = tiny_llama(seed=4, vocab_size=VOCAB)
PLANS = [DraftPlan.of(2, 5, 9), DraftPlan.of(1, 4, 4), DraftPlan.of(3, 2, 4)]


def new_network(seed: int = 0, **changes: Any) -> SpecFormer:
    """A random one, whose norms are not trivial."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    values = {**sizes, **heads, "captured_layers": LAYERS, "num_slots": SLOTS, **changes}
    mx.random.seed(seed)
    network = SpecFormer(SpecFormerConfig(**values))
    network.apply(lambda x: x + 0.2 * mx.random.normal(x.shape))
    mx.eval(network.parameters())
    return network


class Published:
    """The published forward pass on the same tensors, without a cache, in float32."""

    def __init__(self, network: SpecFormer):
        self.tensors = {
            name: torch.from_numpy(np.array(tensor))
            for name, tensor in named_parameters(network).items()
        }
        model: Any = MODEL
        self.final_norm, self.head = (
            torch.from_numpy(np.array(weight))
            for weight in (model.model.norm.weight, model["lm_head"].weight)
        )

    def log_probs(self, states: mx.array) -> torch.Tensor:
        """Those of all slots after the last of the states, (n, S) to (slots, V)."""
        given = torch.from_numpy(np.array(states)).split(HIDDEN, dim=-1)
        normed = [self._norm(part, f"norms.{i}") for i, part in enumerate(given)]
        h = torch.cat(normed, dim=-1) @ self.tensors["down_samp.weight"].T
        h = self._attend("decoder_att", self._norm(h, "decoder_input_norm")) + h
        h = self._norm(h, "positional_input_norm")
        x = h @ self.tensors["positional.weight"].T + self.tensors["positional.bias"]
        x = x.view(len(states), SLOTS, HIDDEN)[-1]
        x = self._attend("encoder_att", self._norm(x, "encoder_input_norm")) + x
        y = self._norm(x, "encoder_ffn_input_norm")
        gate, up, down = (
            self.tensors[f"encoder_ffn.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )
        x = ((y @ gate) * torch.nn.functional.silu(y @ up)) @ down + x
        x = torch.nn.functional.rms_norm(x, (HIDDEN,), self.final_norm, 1e-5)
        return torch.log_softmax(x @ self.head.T, dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, EPS)

    def _attend(self, name: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            (x @ self.tensors[f"{name}.{part}_proj.weight"].T)
            .view(len(x), -1, HIDDEN // HEADS)
            .transpose(0, 1)
            for part in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (rows.repeat_interleave(len(q) // len(rows), dim=0) for rows in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(0, 1).reshape(len(x), -1)
        return mixed @ self.tensors[f"{name}.o_proj.weight"].T

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def test_slots_are_those_of_the_equations_whatever_the_steps_before() -> None:
    network = new_network()
    published, width, rng = Published(network), len(LAYERS) * HIDDEN, random.Random(1)
    for _, states, tree in drafts_after_any_steps(network, Target(MODEL), width, PLANS, rng):
        _assert_scores(published.log_probs(states), tree)


def _assert_scores(log_probs: torch.Tensor, tree: Any) -> None:
    """Every node's score is that of its parent and of its token in the slot of its depth."""
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    depths, scores = to_ints(tree.depths), [0.0, *tree.read().scores]
    for node in range(1, len(tokens)):
        expected = log_probs[depths[node] - 1, tokens[node]].item()
        assert scores[node] - scores[parents[node]] == pytest.approx(expected, abs=TOLERANCE)
    best = log_probs[0].argmax().item()
    assert best in tokens[1:], "the most probable token is drafted"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    network = new_network(head_dim=8)
    quantize_drafter(network, 8, 32)
    save_drafter(network, tmp_path)
    assert recognise(tmp_path)[0].NAME == "SpecFormer"
    again = load_specformer(tmp_path)
    assert again.config == network.config
    states = mx.random.normal((3, len(LAYERS) * HIDDEN), key=mx.random.key(1))
    one, other = (
        net.slots(net(net.fuse(states), mx.array([]), net.make_cache()), 2)
        for net in (network, again)
    )
    assert mx.array_equal(one, other).item()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network = new_network()
    save_drafter(network, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"num_slots": 0}, "num_slots must be"),
        ({"captured_layers": []}, "captured_layers must be a list of 1 to 64 layers"),
        ({"captured_layers": 3}, "captured_layers must be a list"),
        ({"captured_layers": [-2, 0]}, "each of captured_layers must be"),
        ({"hidden_size": 33}, "hidden_size must be a multiple"),
        ({"captured_layers": [0, 1]}, "down_samp.weight' has shape"),
        ({"rope_scaling": {"type": "nonsense"}}, "check rope_scaling"),
        ({"model_type": "redrafter_medusa"}, "expected a drafter with model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            load_specformer(tmp_path)
    network.positional.bias = network.positional.bias * mx.inf
    save_drafter(network, tmp_path)
    with pytest.raises(NonFiniteError, match=r"positional\.bias"):
        load_specformer(tmp_path)


def test_other_targets_are_refused() -> None:
    tokenizer = wrapped_tokenizer(VOCAB, set())
    wide = new_network(hidden_size=64, captured_layers=(0, 1))
    with pytest.raises(CheckpointError, match="hidden_size 64 does not match"):
        wide.check_fit(Target(MODEL), tokenizer)
    deep = new_network(captured_layers=(0, 9))
    with pytest.raises(UnsupportedTargetError, match="expected inputs of layers 0 to 2 "):
        deep.check_fit(Target(MODEL), tokenizer)
    options = {"drafter": new_network(), "beam_width": 1, "beam_length": 6}
    with pytest.raises(ConfigError, match="beam_length must be at most 5"):
        generate(MODEL, tokenizer, [1, 2], **options)
    without = Target(build(tiny_config("nanochat")))  # its last norm has no weight
    with pytest.raises(UnsupportedTargetError, match="LM head gets the output of a norm"):
        without.modules.normalise(mx.zeros((1, without.hidden_size)))


NORMS = {
    "gemma2": "model.norm",
    "gpt2": "model.ln_f",
    "lfm2": "model.embedding_norm",
    "mamba2": "backbone.norm_f",
    "phixtral": "lm_head.ln",
    "stablelm": "model.norm",
}


@pytest.mark.parametrize(("name", "path"), NORMS.items())
def test_the_norm_before_the_head_is_found(name: str, path: str) -> None:
    model = build(tiny_config(name))
    target = Target(model)
    states = mx.random.normal((3, target.hidden_size), key=mx.random.key(0))
    norm = reduce(getattr, path.split("."), model)
    assert mx.array_equal(target.modules.normalise(states), norm(states)).item()

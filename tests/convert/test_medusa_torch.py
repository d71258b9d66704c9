"""Medusa heads written by real torch in every published layout give torch's own numbers.

The equations are those of arXiv 2401.10774: x = h; x = x + silu(W x + b), n times; logits = V x.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from safetensors.torch import save_file  # noqa: E402

from mlx_redrafter.convert.conversion import ConversionOptions, convert_drafter  # noqa: E402
from mlx_redrafter.device_read import to_ints  # noqa: E402
from mlx_redrafter.proposers.medusa import load as load_medusa  # noqa: E402
from mlx_redrafter.proposers.medusa.network import Medusa  # noqa: E402

pytestmark = pytest.mark.torch

HIDDEN, VOCAB = 16, 96
MAP = [5, 0, 7, 95, 33, 12]


class ResBlock(torch.nn.Module):
    """The published block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return x + torch.nn.functional.silu(self.linear(x))


class Blocks(torch.nn.Module):
    """vLLM's blocks of one head."""

    def __init__(self, num_layers: int, bias: bool):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x


class VllmHeads(torch.nn.Module):
    """vLLM's module."""

    def __init__(self, num_heads: int, num_layers: int, rows: int, bias: bool, is_shared: bool):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Blocks(num_layers, bias) for _ in range(num_heads))
        finals = [torch.nn.Linear(HIDDEN, rows, bias=False) for _ in range(num_heads)]
        self.lm_heads = torch.nn.ModuleList([finals[0]] * num_heads if is_shared else finals)

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Logits of every head."""
        return [
            final(block(hidden)) for block, final in zip(self.blocks, self.lm_heads, strict=True)
        ]


def fasterdecoding(num_heads: int, num_layers: int) -> torch.nn.ModuleList:
    """The published heads; one block stands for all of a head, as there."""
    return torch.nn.ModuleList(
        torch.nn.Sequential(
            *([ResBlock()] * num_layers), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        )
        for _ in range(num_heads)
    )


def written(folder: Path, layout: str) -> list[torch.Tensor]:
    """Write heads in a layout, and return each one's log-probabilities of `hidden_states`."""
    torch.manual_seed(3)
    hidden = torch.from_numpy(hidden_states())
    config: dict[str, Any]
    if layout.startswith("vllm"):
        rows = len(MAP) if "map" in layout else VOCAB
        heads: Any = VllmHeads(3, 2, rows, "bias" in layout, "shared" in layout)
        state = heads.state_dict()
        if "map" in layout:
            state["token_map"] = torch.tensor(MAP)
        if "shared" in layout:
            state = {n: t for n, t in state.items() if n in ("lm_heads.0.weight",) or "blocks" in n}
        config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        config |= {"num_heads": 3, "num_hidden_layers": 2, "original_lm_head": "shared" in layout}
        save_file(state, folder / "model.safetensors")
        found = heads(hidden)
    else:
        num_layers = {"pt, two blocks": 2, "pt, no block": 0}.get(layout, 1)
        heads = fasterdecoding(5, num_layers)
        dtype = torch.bfloat16 if "bfloat16" in layout else torch.float32
        heads = heads.to(dtype)
        # Uploaded configs say two heads where there are five.
        config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers}
        config |= {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
        if "safetensors" in layout:
            save_file(heads.state_dict(), folder / "medusa_lm_head.safetensors")
        else:
            torch.save(heads.state_dict(), folder / "medusa_lm_head.pt")
        heads = heads.float()
        found = [head(hidden) for head in heads]
    (folder / "config.json").write_text(json.dumps(config))
    return [torch.log_softmax(logits, dim=-1).detach() for logits in found]


def hidden_states() -> np.ndarray:
    random = np.random.default_rng(1)
    return random.standard_normal((7, HIDDEN)).astype(np.float32)


def assert_equal(network: Medusa, expected: list[torch.Tensor]) -> None:
    assert network.config.num_heads == len(expected)
    hidden = mx.array(hidden_states())
    for head, wanted in enumerate(expected):
        found = np.array(network.log_probs(hidden, head))
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5, rtol=0)


LAYOUTS = (
    "pt", "pt, bfloat16", "pt, two blocks", "pt, no block", "safetensors", "vllm", "vllm, bias",
    "vllm, map", "vllm, shared",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_torchs(tmp_path: Path, layout: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    expected = written(source, layout)
    converted = convert_drafter(source, tmp_path / "out", ConversionOptions(dtype="float32"))
    networks = [load_medusa(tmp_path / "out")]
    if "pt" not in layout:
        networks.append(load_medusa(source))
    for network in networks:
        assert_equal(network, expected)
        ids = to_ints(network.to_token_ids(mx.arange(3)))
        assert ids == (MAP[:3] if "map" in layout else [0, 1, 2])
    notes = ["config.json says medusa_num_heads 2, the file has 5 heads"]
    assert converted.provenance["notes"] == ([] if "vllm" in layout else notes)

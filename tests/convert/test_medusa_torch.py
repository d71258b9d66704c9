"""Medusa heads written by real torch in every published layout give torch's own numbers.

The equations are those of arXiv 2401.10774: x = h; x = x + silu(W x + b), n times; logits = V x.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from safetensors.torch import save_file  # noqa: E402
from torch.nn import ModuleDict, ModuleList, Sequential  # noqa: E402

from mlx_redrafter.convert.conversion import ConversionOptions, convert_drafter  # noqa: E402
from mlx_redrafter.device_read import to_ints  # noqa: E402
from mlx_redrafter.proposers.medusa import load as load_medusa  # noqa: E402
from mlx_redrafter.proposers.medusa.network import Medusa  # noqa: E402

pytestmark = pytest.mark.torch

HIDDEN, VOCAB = 16, 96
MAP = [5, 0, 7, 95, 33, 12]


def linear(rows: int = HIDDEN, bias: bool = True) -> torch.nn.Linear:
    return torch.nn.Linear(HIDDEN, rows, bias=bias)


def log_probs(blocks: Sequence[torch.nn.Linear], final: torch.nn.Linear) -> torch.Tensor:
    """Compute log-probabilities of a head after each of the `hidden_states`."""
    x = torch.from_numpy(hidden_states())
    for block in blocks:
        x = x + torch.nn.functional.silu(block(x))
    return torch.log_softmax(final(x), dim=-1)


def written(folder: Path, layout: str) -> list[torch.Tensor]:
    """Write heads in a layout, and return each one's log-probabilities."""
    torch.manual_seed(3)
    config: dict[str, Any]
    if layout.startswith("vllm"):
        is_shared, rows = "shared" in layout, len(MAP) if "map" in layout else VOCAB
        finals = [linear(rows, False) for _ in range(3)]
        finals = finals[:1] * 3 if is_shared else finals
        heads = [([linear(bias="bias" in layout) for _ in range(2)], final) for final in finals]
        parts = [ModuleDict({"layers": ModuleList(blocks)}) for blocks, _ in heads]
        names = {
            "blocks": ModuleList(parts),
            "lm_heads": ModuleList(finals[: 1 if is_shared else 3]),
        }
        state = ModuleDict(names).state_dict()
        if "map" in layout:
            state["token_map"] = torch.tensor(MAP)
        config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        config |= {"num_heads": 3, "num_hidden_layers": 2, "original_lm_head": is_shared}
    else:
        num_layers = {"pt, two blocks": 2, "pt, no block": 0}.get(layout, 1)
        # One block stands for all of a head, as in the published code.
        heads = [([linear()] * num_layers, linear(VOCAB, False)) for _ in range(5)]
        parts = [
            Sequential(*(ModuleDict({"linear": block}) for block in blocks), final)
            for blocks, final in heads
        ]
        whole = ModuleList(parts).to(torch.bfloat16 if "bfloat16" in layout else torch.float32)
        state = whole.state_dict()
        whole.float()
        # Uploaded configs say two heads where there are five.
        config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers}
        config |= {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    if layout.startswith("pt"):
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        stem = "model" if layout.startswith("vllm") else "medusa_lm_head"
        save_file(state, folder / f"{stem}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return [log_probs(*head) for head in heads]


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

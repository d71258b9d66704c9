"""Checkpoints written by real torch: every variant, format and dtype gives torch's own numbers.

First those of recurrent drafters, then Medusa heads.
"""

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from safetensors.torch import save_file  # noqa: E402

from mlx_redrafter.device_read import to_ints  # noqa: E402
from mlx_redrafter.proposers.medusa import load as load_medusa  # noqa: E402
from mlx_redrafter.proposers.redrafter import load as load_drafter  # noqa: E402
from mlx_redrafter.proposers.redrafter.network import Drafter  # noqa: E402
from tests.convert import handmade  # noqa: E402
from tests.helpers.torch_heads import Recurrent, residual_blocks  # noqa: E402

pytestmark = pytest.mark.torch

BASE = {**handmade.CONFIG, "hidden_size": 16, "vocab_size": 96}
VARIANTS: dict[str, dict[str, Any]] = {
    "rnn-proj": {**BASE, "exit_dim": 24},
    "rnn-wide": {**BASE, "exit_dim": 32},
    "sum-proj": {**BASE, "exit_dim": 16, "rnn": False},
    "sum-wide": {**BASE, "exit_dim": 32, "rnn": False, "num_draft_layers": 1},
    "no-blocks": {**BASE, "exit_dim": 24, "num_draft_layers": 0},
    "small-vocabulary": {**BASE, "exit_dim": 24, "vocab_size": 40},
    "tensorrt": {**BASE, "exit_dim": 24},
    "tensorrt-sum": {**BASE, "exit_dim": 32, "rnn": False},
}
FORMATS = ("safetensors", "sharded", "zip", "zip-sharded", "parameters", "views")
DTYPES = ("float32", "float16", "bfloat16")


def random_state_dict(config: Mapping[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """Weights as they are stored: rounded to ``dtype``."""
    torch.manual_seed(1)
    return {
        name: (torch.randn(shape) / 6).to(getattr(torch, dtype))
        for name, shape in handmade.shapes(config).items()
    }


def tensorrt_names(state_dict: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, value in state_dict.items():
        name = name.replace(f"lm_head.{layers}.weight", "lm_head.weight")
        name = name.replace("lm_head.", "layers.") if ".linear." in name else name
        renamed[f"drafter.{name}"] = value
    target = torch.zeros(3, 3)
    return renamed | {"lm_head.weight": target, "transformer.ln_f.weight": target[0].clone()}


def write(folder: Path, state_dict: dict[str, torch.Tensor], file_format: str) -> None:
    """Save a state dict as people do."""
    names = sorted(state_dict)
    halves = [{n: state_dict[n] for n in names[:3]}, {n: state_dict[n] for n in names[3:]}]
    if file_format == "safetensors":
        save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})
    elif file_format in ("sharded", "zip-sharded"):
        stem, suffix, save = "model", "safetensors", save_file
        if file_format == "zip-sharded":
            stem, suffix, save = "pytorch_model", "bin", torch.save
        files = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
        for half, file in zip(halves, files, strict=True):
            save(half, folder / file)
        owners = {name: file for half, file in zip(halves, files, strict=True) for name in half}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": owners}))
    elif file_format == "zip":
        torch.save(state_dict, folder / "pytorch_model.bin")
    elif file_format == "parameters":  # a training checkpoint of nn.Parameters
        parameters = {name: torch.nn.Parameter(value) for name, value in state_dict.items()}
        wrapped = {"state_dict": parameters, "epoch": 3, "lr": 1e-3, "betas": (0.9, 0.95)}
        torch.save(wrapped, folder / "model.pt")
    else:
        torch.save(as_views(state_dict), folder / "model.pt")


def as_views(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as transposed views into one storage that all tensors share."""
    values = list(state_dict.values())
    padding = torch.zeros(5, dtype=values[0].dtype)
    flat = torch.cat([padding, *(value.t().flatten() for value in values)])
    views, start = {}, 5
    for name, value in state_dict.items():
        part = flat[start : start + value.numel()]
        views[name] = part.view(value.t().shape).t()
        start += value.numel()
        assert torch.equal(views[name], value)
    return views


# All formats and dtypes of one variant, and all variants in one format.
CASES = [
    *product(["rnn-proj"], FORMATS, DTYPES),
    *product(list(VARIANTS)[1:], FORMATS[:1], DTYPES[:1]),
]


@pytest.mark.parametrize(("variant", "file_format", "dtype"), CASES)
def test_probabilities_are_torchs(tmp_path, variant, file_format, dtype):
    config, is_tensorrt = VARIANTS[variant], variant.startswith("tensorrt")
    state_dict = random_state_dict(config, dtype)
    source = tmp_path / "source"
    if is_tensorrt:
        layers = config["num_draft_layers"]
        write_tensorrt(source, tensorrt_names(state_dict, layers), config)
    else:
        handmade.write_config(source, config)
        write(source, state_dict, file_format)

    handmade.convert(source, tmp_path / "out", dtype="float32")
    drafter = load_drafter(tmp_path / "out")
    widened = {name: value.float() for name, value in state_dict.items()}
    published = Recurrent(widened, is_tensorrt)
    check_probabilities(drafter, published)


def write_tensorrt(
    folder: Path, state_dict: dict[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size")}
    values = {
        "architecture": "ReDrafterForCausalLM", **sizes, "quantization": {"quant_algo": None},
        "mapping": {"world_size": 1, "tp_size": 1}, "redrafter_is_rnn": config["rnn"],
        "redrafter_num_layers": config["num_draft_layers"],
        "redrafter_hidden_size": config["hidden_size"], "redrafter_exit_dim": config["exit_dim"],
    }  # fmt: skip
    handmade.write_config(folder, values)
    save_file(state_dict, folder / "rank0.safetensors")


def check_probabilities(drafter: Drafter, published: Recurrent) -> None:
    """Along three steps of three beams, probabilities are the published ones."""
    generator = torch.Generator().manual_seed(2)
    hidden_size = drafter.config.hidden_size
    hidden = torch.randn(hidden_size, generator=generator)
    state, expected_state = None, None
    for _ in range(3):
        embedding = torch.randn(3, hidden_size, generator=generator)
        expected_state = published.advance(expected_state, embedding)
        own = drafter.project_input(mx.array(embedding.numpy()))
        state = drafter.start(own) if state is None else drafter.advance(state, own)
        logits = published.logits(hidden, expected_state)
        if not published.is_tensorrt:  # Apple keeps the 50 largest ones
            least = torch.topk(logits, min(50, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        expected = torch.softmax(logits, dim=-1).numpy()
        found = np.exp(np.array(drafter.log_probs(mx.array(hidden.numpy()), state)))
        np.testing.assert_allclose(found, expected, atol=1e-7, rtol=5e-5)


# Medusa heads

HIDDEN, VOCAB = 16, 96
MAP = [5, 0, 7, 95, 33, 12]
HIDDEN_STATES = np.random.default_rng(1).standard_normal((7, HIDDEN)).astype(np.float32)


def write_medusa(folder: Path, layout: str) -> list[torch.Tensor]:
    """Write heads in a layout, and return each one's log-probabilities after `HIDDEN_STATES`."""
    is_vllm, is_shared = layout.startswith("vllm"), "shared" in layout
    rows = len(MAP) if "map" in layout else VOCAB
    blocks = {"pt, two blocks": 2, "pt, no block": 0}.get(layout, 2 if is_vllm else 1)
    values = handmade.medusa(3 if is_vllm else 5, HIDDEN, rows, blocks)
    weights = {name: torch.from_numpy(value) / 4 for name, value in values.items()}
    if is_vllm:
        if is_shared:
            weights |= {f"{head}.2.weight": weights["0.2.weight"] for head in (1, 2)}
        if "bias" not in layout:
            weights = {name: weight for name, weight in weights.items() if "bias" not in name}
        state = {vllm_name(name): weight for name, weight in weights.items()}
        config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        config |= {"num_heads": 3, "num_hidden_layers": 2, "original_lm_head": is_shared}
        if is_shared:
            del state["lm_heads.1.weight"], state["lm_heads.2.weight"]
        if "map" in layout:
            state["token_map"] = torch.tensor(MAP)
        save_file(state, folder / "model.safetensors")
    else:
        # One block stands for all of a head, as in the published code.
        weights = {name: weights[name.replace(".1.lin", ".0.lin")] for name in weights}
        dtype = torch.bfloat16 if "bfloat16" in layout else torch.float32
        state = {name: weight.to(dtype) for name, weight in weights.items()}
        weights = {name: weight.float() for name, weight in state.items()}
        # Uploaded configs say two heads where there are five.
        config = {"medusa_num_heads": 2, "medusa_num_layers": blocks}
        config |= {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
        is_pickle = layout.startswith("pt")
        save, suffix = (torch.save, "pt") if is_pickle else (save_file, "safetensors")
        save(state, folder / f"medusa_lm_head.{suffix}")
    (folder / "config.json").write_text(json.dumps(config))
    heads = map(str, range(3 if is_vllm else 5))
    hidden = torch.from_numpy(HIDDEN_STATES)
    return [residual_blocks(weights, head, hidden).log_softmax(-1) for head in heads]


def vllm_name(name: str) -> str:
    """The name of a tensor in vLLM's files of heads with two blocks."""
    name = re.sub(r"^(\d)\.(\d)\.linear", r"blocks.\1.layers.\2", name)
    return re.sub(r"^(\d)\.2", r"lm_heads.\1", name)


LAYOUTS = (
    "pt", "pt, bfloat16", "pt, two blocks", "pt, no block", "safetensors", "vllm", "vllm, bias",
    "vllm, map", "vllm, shared",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_of_medusa_heads_are_torchs(tmp_path, layout):
    source = tmp_path / "source"
    source.mkdir()
    expected = write_medusa(source, layout)
    converted = handmade.convert(source, tmp_path / "out", dtype="float32")
    networks = [load_medusa(tmp_path / "out")]
    if "pt" not in layout:
        networks.append(load_medusa(source))
    for network in networks:
        assert network.config.num_heads == len(expected)
        for head, wanted in enumerate(expected):
            found = np.array(network.log_probs(mx.array(HIDDEN_STATES), head))
            np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5, rtol=0)
        ids = to_ints(network.to_token_ids(mx.arange(3)))
        assert ids == (MAP[:3] if "map" in layout else [0, 1, 2])
    notes = ["config.json says medusa_num_heads 2, the file has 5 heads"]
    assert converted.provenance["notes"] == ([] if "vllm" in layout else notes)

"""Sizes of a model, from its config alone or from its family and size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_redrafter.bench.chips import BYTES
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.architectures import REFUSED
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.model_parts import check_config, find_parts
from mlx_redrafter.training.resources import TargetSize

# Sizes of Llama 2: billions of parameters, hidden size and vocabulary.
LLAMA_2 = {"7B": (6.74, 4096, 32000), "13B": (13.0, 5120, 32000)}
# The same of Llama 3.
LLAMA_3 = {
    "1B": (1.24, 2048, 128256),
    "3B": (3.21, 3072, 128256),
    "8B": (8.03, 4096, 128256),
    "70B": (70.6, 8192, 128256),
}
# The same of published models, by family and size.
FAMILIES: Mapping[str, Mapping[str, tuple[float, int, int]]] = {
    "llama": LLAMA_3,
    "llama2": LLAMA_2,
    "vicuna": LLAMA_2,
    "mistral": {"7B": (7.25, 4096, 32768)},
    "phi3": {"3.8B": (3.82, 3072, 32064), "14B": (14.0, 5120, 32064)},
    "qwen2": {
        "0.5B": (0.49, 896, 151936),
        "1.5B": (1.54, 1536, 151936),
        "3B": (3.09, 2048, 151936),
        "7B": (7.62, 3584, 152064),
        "14B": (14.8, 5120, 152064),
        "32B": (32.8, 5120, 152064),
        "72B": (72.7, 8192, 152064),
    },
    "qwen3": {
        "0.6B": (0.6, 1024, 151936),
        "1.7B": (1.72, 2048, 151936),
        "4B": (4.02, 2560, 151936),
        "8B": (8.19, 4096, 151936),
        "14B": (14.8, 5120, 151936),
        "32B": (32.8, 5120, 151936),
    },
    "gemma2": {"2B": (2.61, 2304, 256000), "9B": (9.24, 3584, 256000), "27B": (27.2, 4608, 256000)},
}
# Other names of a family, without spaces and hyphens.
ALIASES = {"llama3": "llama", "llama3.1": "llama", "llama3.2": "llama", "qwen2.5": "qwen2"}
# A family with a size, for error messages.
EXAMPLE = "'llama 8B 4bit'"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: Name in tables.
        parameters: Number of all parameters.
        active: Number of parameters read per token; fewer than all in a mixture of experts.
        bits: Bits of the weights, the nearest of 16, 8 and 4.
        hidden_size: Size of a hidden state, H.
        vocab_size: Number of rows of the input embedding, V.
    """

    name: str
    parameters: float
    active: float
    bits: int
    hidden_size: int
    vocab_size: int

    def __str__(self) -> str:
        active = ""
        if self.active < self.parameters:
            active = f", {_format_count(self.active)} of them for a token"
        return (
            f"{self.name}: {_format_count(self.parameters)} parameters{active}, {self.bits} bits, "
            f"hidden size {self.hidden_size}, {self.vocab_size:,} tokens"
        )

    @property
    def target_size(self) -> TargetSize:
        """Sizes that the cost of training depends on."""
        weights = round(self.parameters * BYTES[self.bits])
        return TargetSize(self.hidden_size, self.vocab_size, weights)


def shape_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Read the sizes of a model from its ``config.json``, without creating weights.

    Raises:
        CheckpointError: mlx-lm cannot make the model.
        UnsupportedTargetError: The model cannot be decoded exactly.
    """
    model = make_model(name, config)
    parts = find_parts(model)
    weights = named_parameters(model).values()
    parameters = sum(weight.size for weight in weights)
    text_config = config.get("text_config")
    text_config = text_config if isinstance(text_config, Mapping) else config
    chosen = text_config.get("num_experts_per_tok", text_config.get("moe_topk"))
    idle = 0.0
    if isinstance(chosen, int):  # experts are stacked: weights of three axes
        stacked = [weight for weight in weights if weight.ndim == 3]
        idle = sum(weight.size * max(0.0, 1 - chosen / weight.shape[0]) for weight in stacked)
    return ModelShape(
        name, parameters, parameters - idle, _bits(config), parts.hidden_size, parts.vocab_size
    )


def shape_of_family(description: str) -> ModelShape:
    """Look up the sizes of a model by family, size, and bits (16 if none are given).

    Raises:
        ConfigError: The family or the size is unknown.
        UnsupportedTargetError: The family cannot be decoded exactly.
    """
    match = re.fullmatch(
        r"\s*(?P<family>.*?\D)[\s-]*\b(?P<size>\d+(\.\d+)?[BM])\b[\s-]*((?P<bits>\d+)[\s-]*bits?)?\s*",
        description,
        re.IGNORECASE,
    )
    if match is None:
        raise ConfigError(
            "expected a model folder, a repository like org/name or a family with a size like "
            f"{EXAMPLE}, got {description!r}"
        )
    name = match["family"].strip(" -")
    family = re.sub(r"[\s_-]", "", name).lower()
    sizes = FAMILIES.get(ALIASES.get(family, family))
    if sizes is None:
        for kind in REFUSED:
            if kind.replace("_", "") == family:
                check_config({"model_type": kind})  # raises an error with the reason
        raise ConfigError(
            f"expected a family out of {', '.join(FAMILIES)}, got {name!r}; name a "
            "folder or a repository for other models"
        )
    size = match["size"].upper()
    if size not in sizes:
        raise ConfigError(f"expected a size of {family} out of {', '.join(sizes)}, got {size}")
    billions, hidden, vocab = sizes[size]
    bits = _nearest_bits(int(match["bits"] or 16))
    return ModelShape(f"{name} {size}", billions * 1e9, billions * 1e9, bits, hidden, vocab)


def _format_count(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _bits(config: Mapping[str, Any]) -> int:
    for key in ("quantization", "quantization_config"):
        quantization = config.get(key)
        if isinstance(quantization, Mapping) and isinstance(quantization.get("bits"), int):
            return _nearest_bits(quantization["bits"])
    return 16


def _nearest_bits(bits: int) -> int:
    return min(BYTES, key=lambda known: abs(known - bits))

"""What cannot be decoded exactly is refused by name and reason, before any text."""

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.utils import MODEL_REMAPPING

from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.architectures import ARCHITECTURES, REFUSED, SUPPORTED, WRAPPERS
from mlx_redrafter.target.model_parts import check_config, find_parts
from tests.helpers.models import supported_names
from tests.models.tiny_models import Config, build, tiny_config

ODD: Config = {"type": "quadratic"}
SLIDING: Config = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}


def refusal_of(config: Config) -> str:
    with pytest.raises(UnsupportedTargetError) as caught:
        check_config(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "mlx_lm.generate" in message
    return message


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_model_types(model_type):
    message = refusal_of({"model_type": model_type})
    assert f"'{model_type}'" in message
    assert REFUSED[model_type] in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "transformerx"}, "'transformerx'"),
        ({}, "model_type"),
        ({"model_type": "deepseek_v41_text"}, "'deepseek_v41_text'"),
        ({"model_type": "llama", "model_file": "model.py"}, "code of its own"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "bitnet"}}, "Metal"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "quadratic"}}, "'quadratic'"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "quadratic"}}, "'quadratic'"),
        ({"model_type": "laguna", "rope_parameters": {"full_attention": ODD}}, "'quadratic'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn"}}, "'yarn'"),
        ({"model_type": "deepseek_v2"}, "'default'"),
        ({"model_type": "qwen3_vl", "text_config": {"rope_scaling": ODD}}, "'quadratic'"),
    ],
)
def test_refused_configs(config, words):
    assert words in refusal_of(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": 4096},  # mlx-lm attends to all tokens
        {"model_type": "llama", "layer_types": ["full_attention"], "rope_scaling": None},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        {"model_type": "kimi_k2", "rope_scaling": {"type": "yarn"}},
        {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope"}},
        {"model_type": "llava", "text_config": None},
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        {"model_type": "llama", **SLIDING},
        {"model_type": "mistral3", "text_config": {"model_type": "ministral3", **SLIDING}},
        {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
    ],
)
def test_accepted_configs(config):
    check_config(config)


def test_every_supported_name_is_accepted_or_needs_a_certain_rope():
    names = supported_names()
    assert {"mistral", "kimi_k2", "qwen2_5_vl", "llama"} <= set(names)
    for name, kinds in SUPPORTED.items():
        for rope in kinds:
            check_config(tiny_config(name, rope))
    for name in names:
        kind = SUPPORTED[MODEL_REMAPPING.get(name, name)][0]
        check_config({"model_type": name, "rope_scaling": {"type": kind}})
    assert not set(SUPPORTED) & set(REFUSED)
    assert set(SUPPORTED) == set(ARCHITECTURES) | set(WRAPPERS)


def test_built_model_of_refused_type():
    with pytest.raises(UnsupportedTargetError, match="'bitnet'"):
        find_parts(build({**tiny_config("llama"), "model_type": "bitnet"}))


@pytest.mark.parametrize(
    ("cache", "words"), [(object(), r"object\(\)"), (RotatingKVCache(8, keep=4), "keep=4")]
)
def test_built_model_with_other_caches(cache, words):
    class Quirky(llama.Model):
        def make_cache(self) -> list[Any]:
            return [cache for _ in self.layers]

    model = build(tiny_config("llama"))
    Quirky.__module__ = llama.__name__
    model.__class__ = Quirky
    with pytest.raises(UnsupportedTargetError, match=f"caches .*{words}"):
        find_parts(model)


def test_built_models_with_an_unknown_rope_or_from_elsewhere():
    class SpiralRoPE(nn.Module):
        pass

    model: Any = build(tiny_config("llama"))
    model.model.layers[1].self_attn.rope = SpiralRoPE()
    for wrong, message in ((model, "SpiralRoPE"), (SpiralRoPE(), "test_refusals")):
        with pytest.raises(UnsupportedTargetError, match=message):
            find_parts(wrong)

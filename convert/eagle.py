"""Conversion of EAGLE heads.

Programs disagree whether a layer's number means its input or its output, and the config of a head
may name another rotary embedding than the one it was trained with. So the self-test tries these
readings, too.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading, predict_next
from mlx_redrafter.convert.source import Source
from mlx_redrafter.errors import join_shortened, quote
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import read_published, rope_of
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target


class ForeignEagle(ForeignDrafter):
    noun = "an EAGLE head"
    linked = "An [EAGLE](https://arxiv.org/abs/2503.01840) head"
    name_set = "eagle"
    network = Eagle

    def __init__(self, source: Source, options: ConversionOptions):
        super().__init__(source, options)
        self.config, self.names = read_published(source.config, source.shapes)
        self.check("use a head that is not quantised")
        if left_out := sorted(source.tensors.keys() - self.names.values()):
            self.notes.append(f"not needed, left out: {join_shortened(map(quote, left_out))}")
        names = "speculators'" if "speculators_model_type" in source.config else "SafeAILab's"
        if source.config.get("model_type") == MODEL_TYPE:
            names = "this package's"
        self.kind = self.describe(f"{self.config.name} head", f", with {names} names")

    def test(self, network: Eagle, target: Target, tokenizer: TokenizerWrapper) -> Reading[Eagle]:
        assert self.options.target is not None
        values = read_config(find_checkpoint(self.options.target, CONFIG_ONLY))
        readings = dict(_readings(network, target, rope_of(values.get("text_config", values))))
        return choose_reading(readings, target, tokenizer, predict_next)


def _readings(eagle: Eagle, target: Target, rope: dict[str, Any]) -> Iterator[tuple[str, Eagle]]:
    """List copies with the layers and embeddings that a head may have, first as its config says."""
    own = tuple(eagle.captured_layers(target))
    turned = with_rope(eagle, rope)
    for layers, step in ((AS_IT_SAYS, 0), ("earlier layers", -1), ("later layers", 1)):
        shifted = tuple(layer + step for layer in own)
        if step and (FINAL in own or min(shifted) < 0 or max(shifted) > len(target.modules.layers)):
            continue
        for head, suffix in ((eagle, ""), (turned, ", rotated as the target")):
            if head is not None:
                if step:
                    head = copy.copy(head)  # the weights are shared
                    head.config = replace(head.config, captured_layers=shifted)
                yield layers + suffix, head


def with_rope(eagle: Eagle, rope: dict[str, Any]) -> Eagle | None:
    """Copy a head with another rotary embedding; return None if it has that one already."""
    config = replace(eagle.config, **rope)
    if config == eagle.config:
        return None
    other = copy.deepcopy(eagle)
    other.config = config
    for layer, made in zip(other.layers, build(Eagle, config).layers, strict=True):
        layer.self_attn.rope = made.self_attn.rope
    return other

"""Conversion of recurrent drafters; shapes give what ``config.json`` leaves out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.names import map_names
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading, dequantised
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.vocabulary import fit_head
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.checkpoint import describe_misfits
from mlx_redrafter.proposers.fit import Prediction, ReadSequence
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.redrafter.config import Activation, DrafterConfig
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate, predict
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target

# This package's config key by TensorRT-LLM's, whose plain "hidden_size" is the target's.
_TENSORRT_KEYS = {
    "redrafter_num_layers": "num_draft_layers",
    "redrafter_hidden_size": "hidden_size",
    "redrafter_exit_dim": "exit_dim",
    "redrafter_is_rnn": "rnn",
}
_SHAPE_KEYS = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")
_VARIANT_KEYS = (
    "rnn_activation", "rnn_first_step_bias", "draft_top_k", "draft_vocab_size", "score_scale",
    "noise_share",
)  # fmt: skip
# Number of logits that Apple's `warp_logits` keeps.
APPLE_TOP_K = 50


class ForeignRecurrent(ForeignDrafter):
    noun = "a recurrent drafter"
    linked = "A [Recurrent Drafter](https://arxiv.org/abs/2403.09919)"
    takes = ("rnn_activation", "vocab_slice")
    config: DrafterConfig

    def __init__(self, source: Source, options: ConversionOptions):
        super().__init__(source, options)
        self.name_set, self.names, self.notes = map_names(source.tensors, source.config)
        self.config = self._infer_config()
        self.kind = self.describe(self.noun, f" with {self.name_set} names")
        if source.config.get("speculators_model_type") == "recurrent_drafting":
            self.warnings.append(
                "drafters of the speculators fork are trained for one step without recurrence and "
                "on other labels than Apple's; expect the target to accept few drafts"
            )

    def build(self, target: Target | None, tokenizer: TokenizerWrapper | None) -> Drafter:
        weights = self.source.read(self.names)
        fit_head(self, weights, target, tokenizer)
        drafter = Drafter(self.config)
        drafter.load_weights(list(weights.items()))
        return drafter

    def test(
        self, network: Drafter, target: Target, tokenizer: TokenizerWrapper
    ) -> Reading[Drafter]:
        copied = dequantised(network)
        readings = {AS_IT_SAYS: copied}
        if copied.config.rnn and self.options.rnn_activation is None:
            readings["other recurrence"] = _with_other_recurrence(copied)
        found = choose_reading(readings, target, tokenizer, _predict)
        fitted = calibrate(found.network, target.modules.embed, found.texts)
        network.config = fitted.applied(found.network.config)
        return found._replace(network=network)

    def _infer_config(self) -> DrafterConfig:
        """Infer the config from ``config.json``, and from the shapes if a value is missing."""
        shapes = {own: self.source.shapes[name] for own, name in self.names.items()}
        inferred = _infer_values(shapes)
        stated = _read_stated(self.source.config)
        lacking = [key for key in _SHAPE_KEYS if key not in inferred and key not in stated]
        if lacking:
            raise CheckpointError(
                f"expected a head (lm_head.*), which determines {', '.join(lacking)}, found none; "
                "check that the checkpoint is complete"
            )
        variant = self._choose_variant(cast(int, inferred.get("vocab_size", 0)))
        if self.options.rnn_activation is not None:
            variant["rnn_activation"] = self.options.rnn_activation
        config = DrafterConfig.from_dict({**inferred, **stated, **variant})
        if problems := describe_misfits(Drafter(config), shapes, self.names):
            sizes = ", ".join(f"{key} {getattr(config, key)}" for key in _SHAPE_KEYS)
            raise CheckpointError(f"the tensors do not fit a drafter with {sizes}: {problems}")
        self.source.check_dtypes(self.names)
        return config

    def _choose_variant(self, num_rows: int) -> dict[str, Any]:
        """Choose the values that no shape determines: by the config, or by the origin."""
        if self.name_set == "tensorrt-llm":
            return {"rnn_activation": "identity", "rnn_first_step_bias": False, "draft_top_k": None}
        values = self.source.config
        variant = {key: values[key] for key in _VARIANT_KEYS if key in values}
        variant.setdefault("draft_top_k", APPLE_TOP_K if num_rows > APPLE_TOP_K else None)
        return variant


def _infer_values(shapes: Shapes) -> dict[str, Any]:
    """Infer config values from the shapes, as far as the shapes determine them."""
    blocks = [name for name in shapes if name.startswith("lm_head.")]
    finals = [name for name in blocks if name.count(".") == 2]
    num_layers = max((int(name.split(".")[1]) for name in finals or blocks), default=0)
    values: dict[str, Any] = {
        "num_draft_layers": num_layers if finals else num_layers + 1,
        "rnn": any(name.startswith("rnn_") for name in shapes),
    }
    head = shapes.get(f"lm_head.{num_layers}.weight", ())
    if len(head) == 2:
        values["vocab_size"], values["exit_dim"] = head
    if len(recurrent := shapes.get("rnn_w.weight", ())) == 2:
        values["hidden_size"] = recurrent[0]
    elif len(projection := shapes.get("input_proj.weight", ())) == 2:
        values["hidden_size"] = projection[1] // 2
    elif "exit_dim" in values:
        values["hidden_size"] = values["exit_dim"] // 2
    return values


def _read_stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the shape in ``config.json``; Apple's default for "not given" is -1."""
    stated = {key: values[key] for key in _SHAPE_KEYS if key in values}
    stated.update({own: values[key] for key, own in _TENSORRT_KEYS.items() if key in values})
    return {key: value for key, value in stated.items() if value is not None and value != -1}


def _with_other_recurrence(drafter: Drafter) -> Drafter:
    other, config = copy.copy(drafter), drafter.config
    activation: Activation = "identity" if config.rnn_activation == "silu" else "silu"
    other.config = replace(config, rnn_activation=activation)
    return other


def _predict(drafter: Drafter, target: Target, text: ReadSequence) -> Prediction:
    return predict(drafter, target.modules.embed, text)[0]

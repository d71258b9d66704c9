"""Conversion of recurrent drafters; shapes give what ``config.json`` leaves out.

Names of tensors without prefixes; i < n residual blocks, the final layer has index n:

    Apple, speculators      input_proj.*   lm_head.{i}.linear.*    lm_head.{n}.weight
    early Apple             input_projs.*  lm_heads.{i}.linear.*   lm_heads.{n}.weight
    head as a bare module                  0.{i}.linear.*          0.{n}.weight
    TensorRT-LLM            input_proj.*   layers.{i}.linear.*     lm_head.weight

All of them have rnn_u.weight, rnn_u.bias and rnn_w.weight.

Source: TensorRT-LLM's examples/redrafter/convert_checkpoint.py, which reads the first three.
"""

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading, dequantised
from mlx_redrafter.convert.source import Source
from mlx_redrafter.errors import CheckpointError, join_shortened, quote
from mlx_redrafter.proposers.checkpoint import collect_sources, describe_misfits
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.redrafter.config import UNUSED_TENSORS, DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter, calibrate, predict
from mlx_redrafter.target.target import Target

_PREFIXES = ("drafter.", "model.")
_KEPT = re.compile(r"rnn_u\.(weight|bias)|rnn_w\.weight|token_ids")
_PROJECTION = re.compile(r"input_projs?\.(weight|bias)")
_BLOCK = re.compile(r"(?:lm_heads?|0|layers)\.([0-9]{1,4})\.linear\.(weight|bias)")
_FINAL = re.compile(r"(?:lm_heads?|0)\.([0-9]{1,4})\.weight")
_TENSORRT_FINAL = "lm_head.weight"
# Prefixes of the target's tensors in checkpoints of both networks.
_TARGET_PREFIXES = ("verifier.", "transformer.", "base_model.")

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
    network = Drafter
    config: DrafterConfig

    def __init__(self, source: Source, options: ConversionOptions):
        super().__init__(source, options)
        self.name_set, self.names, self.notes = _map_names(source.tensors, source.config)
        self.config = self._infer_config()
        self.kind = self.describe(self.noun, f" with {self.name_set} names")
        if source.config.get("speculators_model_type") == "recurrent_drafting":
            self.warnings.append(
                "drafters of the speculators fork are trained for one step without recurrence and "
                "on other labels than Apple's; expect the target to accept few drafts"
            )

    def test(
        self, network: Drafter, target: Target, tokenizer: TokenizerWrapper
    ) -> Reading[Drafter]:
        copied = dequantised(network)
        readings = {AS_IT_SAYS: copied}
        if copied.config.rnn and self.options.rnn_activation is None:
            other = readings["other recurrence"] = copy.copy(copied)
            is_silu = copied.config.rnn_activation == "silu"
            other.config = replace(other.config, rnn_activation="identity" if is_silu else "silu")
        embed = target.modules.embed
        found = choose_reading(
            readings, target, tokenizer, lambda one, _, text: predict(one, embed, text)[0]
        )
        network.config = calibrate(found.network, embed, found.texts)
        return found._replace(network=network)

    def _infer_config(self) -> DrafterConfig:
        """Infer the config from ``config.json``, and from the shapes if a value is missing."""
        shapes = {own: self.source.tensors[name].shape for own, name in self.names.items()}
        inferred = _infer_values(shapes)
        stated = _read_stated(self.source.config)
        lacking = [key for key in _SHAPE_KEYS if key not in inferred and key not in stated]
        if lacking:
            raise CheckpointError(
                f"expected a head (lm_head.*), which determines {', '.join(lacking)}, found none; "
                "check that the checkpoint is complete"
            )
        variant = self._choose_variant(inferred.get("vocab_size", 0))
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


def _map_names(
    names: Iterable[str], config: Mapping[str, Any]
) -> tuple[str, dict[str, str], list[str]]:
    """Map every tensor name of a checkpoint to this package's name, each exactly once.

    Return the naming convention, the names there by this package's names, and notes.
    """
    names = sorted(names)
    bare = {name: _strip_prefixes(name) for name in names if not name.startswith(_TARGET_PREFIXES)}
    is_tensorrt = any(key.startswith("redrafter_") for key in config) or any(
        name != _TENSORRT_FINAL == own for name, own in bare.items()
    )
    if is_tensorrt:
        # Next to TensorRT-LLM's drafter.lm_head.weight, a bare lm_head.weight is the target's head.
        bare.pop(_TENSORRT_FINAL, None)
    blocks = filter(None, map(_BLOCK.fullmatch, bare.values()))
    num_blocks = 1 + max((int(match[1]) for match in blocks), default=-1)
    sources, others = collect_sources(
        bare, lambda name: _translate_name(bare[name], num_blocks, is_tensorrt)
    )
    unused = [
        name
        for name in others
        if bare[name] in UNUSED_TENSORS or name.endswith("rotary_emb.inv_freq")
    ]
    unknown = [name for name in others if name not in unused]
    if unknown:
        raise CheckpointError(
            "expected input_proj, lm_head.{i}.linear, lm_head.{n}, rnn_u and rnn_w, found tensors "
            f"that are not part of a recurrent drafter: {join_shortened(map(quote, unknown))}"
        )
    notes = []
    if unused:
        dropped = join_shortened(map(quote, unused))
        notes.append(f"tensors that the drafter's forward pass never uses, dropped: {dropped}")
    if len(bare) < len(names):
        notes.append(f"{len(names) - len(bare)} tensors of the target were left out")
    return _recognise_name_set(bare.values(), is_tensorrt), sources, notes


def _strip_prefixes(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _translate_name(bare: str, num_blocks: int, is_tensorrt: bool) -> str | None:
    if _KEPT.fullmatch(bare):
        return bare
    if match := _PROJECTION.fullmatch(bare):
        return f"input_proj.{match[1]}"
    if match := _BLOCK.fullmatch(bare):
        return f"lm_head.{int(match[1])}.linear.{match[2]}"
    if match := _FINAL.fullmatch(bare):
        return f"lm_head.{int(match[1])}.weight"
    if is_tensorrt and bare == _TENSORRT_FINAL:
        return f"lm_head.{num_blocks}.weight"
    return None


def _recognise_name_set(bare: Collection[str], is_tensorrt: bool) -> str:
    if is_tensorrt:
        return "tensorrt-llm"
    if any(name.startswith("0.") for name in bare):
        return "sequential"
    if any(name.startswith(("lm_heads.", "input_projs.")) for name in bare):
        return "plural"
    return "apple"

"""Mapping from the tensor names of foreign drafters to those of this package.

Names without prefixes; i < n residual blocks, the final layer has index n:

    Apple, speculators      input_proj.*   lm_head.{i}.linear.*    lm_head.{n}.weight
    early Apple             input_projs.*  lm_heads.{i}.linear.*   lm_heads.{n}.weight
    head as a bare module                  0.{i}.linear.*          0.{n}.weight
    TensorRT-LLM            input_proj.*   layers.{i}.linear.*     lm_head.weight

All of them have rnn_u.weight, rnn_u.bias and rnn_w.weight.

Source: TensorRT-LLM's examples/redrafter/convert_checkpoint.py, which reads the first three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mlx_redrafter.errors import CheckpointError, join_shortened, quote
from mlx_redrafter.proposers.checkpoint import collect_sources
from mlx_redrafter.proposers.redrafter.config import UNUSED_TENSORS

NameSet = Literal["apple", "plural", "sequential", "tensorrt-llm"]

_PREFIXES = ("drafter.", "model.")
_KEPT = re.compile(r"rnn_u\.(weight|bias)|rnn_w\.weight|token_ids")
_PROJECTION = re.compile(r"input_projs?\.(weight|bias)")
_BLOCK = re.compile(r"(?:lm_heads?|0|layers)\.([0-9]{1,4})\.linear\.(weight|bias)")
_FINAL = re.compile(r"(?:lm_heads?|0)\.([0-9]{1,4})\.weight")
_TENSORRT_FINAL = "lm_head.weight"
# Prefixes of the target's tensors in checkpoints of both networks.
_TARGET_PREFIXES = ("verifier.", "transformer.", "base_model.")


def map_names(
    names: Iterable[str], config: Mapping[str, Any]
) -> tuple[NameSet, dict[str, str], list[str]]:
    """Map every tensor name of a checkpoint to this package's name, each exactly once.

    Return the naming convention, the names there by this package's names, and notes.
    """
    names = sorted(names)
    is_tensorrt = _is_tensorrt(names, config)
    # Next to TensorRT-LLM's drafter.lm_head.weight, a bare lm_head.weight is the target's head.
    of_target = {_TENSORRT_FINAL} if is_tensorrt else set()
    kept = [n for n in names if not n.startswith(_TARGET_PREFIXES) and n not in of_target]
    blocks = [match for name in kept if (match := _BLOCK.fullmatch(_strip_prefixes(name)))]
    num_blocks = 1 + max((int(match[1]) for match in blocks), default=-1)
    sources, others = collect_sources(
        kept, lambda name: _translate_name(_strip_prefixes(name), num_blocks, is_tensorrt)
    )
    unused = [
        name
        for name in others
        if _strip_prefixes(name) in UNUSED_TENSORS or name.endswith("rotary_emb.inv_freq")
    ]
    unknown = [name for name in others if name not in unused]
    if unknown:
        raise CheckpointError(
            "expected input_proj, lm_head.{i}.linear, lm_head.{n}, rnn_u and rnn_w, found tensors "
            f"that are not part of a recurrent drafter: {join_shortened(map(quote, unknown))}"
        )
    notes = []
    if unused:
        names_left_out = join_shortened(map(quote, unused))
        notes.append(
            f"tensors that the drafter's forward pass never uses, dropped: {names_left_out}"
        )
    if len(kept) < len(names):
        notes.append(f"{len(names) - len(kept)} tensors of the target were left out")
    return _recognise_name_set(kept, is_tensorrt), sources, notes


def _is_tensorrt(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    return any(key.startswith("redrafter_") for key in config) or any(
        name != _TENSORRT_FINAL == _strip_prefixes(name) for name in names
    )


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


def _recognise_name_set(names: Iterable[str], is_tensorrt: bool) -> NameSet:
    if is_tensorrt:
        return "tensorrt-llm"
    bare = [_strip_prefixes(name) for name in names]
    if any(name.startswith("0.") for name in bare):
        return "sequential"
    if any(name.startswith(("lm_heads.", "input_projs.")) for name in bare):
        return "plural"
    return "apple"

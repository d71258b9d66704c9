"""Which tensor of a foreign drafter is which: name sets in, this package's names out.

Names after the prefixes are gone; i < n residual blocks, the final layer has index n:

    Apple, speculators      input_proj.*   lm_head.{i}.linear.*    lm_head.{n}.weight
    early Apple             input_projs.*  lm_heads.{i}.linear.*   lm_heads.{n}.weight
    head as a bare module                  0.{i}.linear.*          0.{n}.weight
    TensorRT-LLM            input_proj.*   layers.{i}.linear.*     lm_head.weight

with rnn_u.weight, rnn_u.bias and rnn_w.weight in all of them.
Source: TensorRT-LLM's examples/redrafter/convert_checkpoint.py, which reads the first three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlx_redrafter.convert.wording import listed, quoted
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.redrafter.checkpoint import UNUSED_TENSORS

NameSet = Literal["apple", "plural", "sequential", "tensorrt-llm"]

_PREFIXES = ("drafter.", "model.")
_KEPT = re.compile(r"rnn_u\.(weight|bias)|rnn_w\.weight|token_ids")
_PROJECTION = re.compile(r"input_projs?\.(weight|bias)")
_BLOCK = re.compile(r"(?:lm_heads?|0|layers)\.([0-9]{1,4})\.linear\.(weight|bias)")
_FINAL = re.compile(r"(?:lm_heads?|0)\.([0-9]{1,4})\.weight")
_TENSORRT_FINAL = "lm_head.weight"
# The target travels with the drafter in these; it is not what is converted.
_TARGET_PREFIXES = ("verifier.", "transformer.", "base_model.")


@dataclass(frozen=True)
class NamedTensors:
    """The drafter's tensors of a checkpoint.

    Attributes:
        name_set: The convention that the names follow.
        sources: Name in the checkpoint by this package's name.
        notes: What was left out and why, for the user.
    """

    name_set: NameSet
    sources: dict[str, str]
    notes: tuple[str, ...]


def map_names(names: Iterable[str], config: Mapping[str, Any]) -> NamedTensors:
    """Find this package's name for every tensor of a checkpoint, each exactly once.

    Raises:
        CheckpointError: Names are unknown, or two of them mean the same tensor.
    """
    names = sorted(names)
    is_tensorrt = _is_tensorrt(names, config)
    kept = [name for name in names if not _belongs_to_target(name, is_tensorrt)]
    blocks = [match for name in kept if (match := _BLOCK.fullmatch(_bare(name)))]
    num_blocks = 1 + max((int(match[1]) for match in blocks), default=-1)
    sources: dict[str, str] = {}
    unknown: list[str] = []
    for name in kept:
        own = _own_name(_bare(name), num_blocks, is_tensorrt)
        if own is None:
            unknown.append(name)
        elif own in sources:
            raise CheckpointError(
                f"{quoted(sources[own])} and {quoted(name)} both stand for {own}; keep one of them"
            )
        else:
            sources[own] = name
    unused = [name for name in unknown if _is_unused(name)]
    unknown = [name for name in unknown if not _is_unused(name)]
    if unknown:
        raise CheckpointError(
            f"not part of a recurrent drafter: {listed(map(quoted, unknown))}; "
            "expected input_proj, lm_head.{i}.linear, lm_head.{n}, rnn_u and rnn_w"
        )
    notes = []
    if unused:
        names_left_out = listed(map(quoted, unused))
        notes.append(f"never used by the drafter's forward pass, dropped: {names_left_out}")
    if len(kept) < len(names):
        notes.append(f"{len(names) - len(kept)} tensors of the target were left out")
    return NamedTensors(_name_set(kept, is_tensorrt), sources, tuple(notes))


def _is_tensorrt(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    if any(key.startswith("redrafter_") for key in config):
        return True
    return any(_bare(name) == _TENSORRT_FINAL and name != _bare(name) for name in names)


def _belongs_to_target(name: str, is_tensorrt: bool) -> bool:
    # Beside TensorRT-LLM's drafter.lm_head.weight, a bare lm_head.weight is the target's head.
    return name.startswith(_TARGET_PREFIXES) or (is_tensorrt and name == _TENSORRT_FINAL)


def _bare(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _own_name(bare: str, num_blocks: int, is_tensorrt: bool) -> str | None:
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


def _is_unused(name: str) -> bool:
    return _bare(name) in UNUSED_TENSORS or name.endswith("rotary_emb.inv_freq")


def _name_set(names: Iterable[str], is_tensorrt: bool) -> NameSet:
    if is_tensorrt:
        return "tensorrt-llm"
    bare = [_bare(name) for name in names]
    if any(name.startswith("0.") for name in bare):
        return "sequential"
    if any(name.startswith(("lm_heads.", "input_projs.")) for name in bare):
        return "plural"
    return "apple"

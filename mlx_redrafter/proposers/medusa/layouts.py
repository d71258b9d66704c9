"""Names of Medusa heads in published files: i < n residual blocks of head k, then a final layer.

    FasterDecoding      {k}.{i}.linear.weight, .bias    {k}.{n}.weight
    vLLM                blocks.{k}.layers.{i}.weight    lm_heads.{k}.weight    token_map
    this package        heads.{k}.{i}.linear.weight     heads.{k}.{n}.weight   token_ids

The first two may stand behind ``medusa_head.`` or ``medusa_heads.``. vLLM's blocks may have biases,
its heads may share one final layer (``original_lm_head``), and ``token_map`` has the token ids of
its rows. Published configs say two heads where there are five, so tensors are counted.

Source: FasterDecoding's ``medusa_model.py`` and vLLM's ``model_executor/models/medusa.py``.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mlx_redrafter.errors import CheckpointError, join_shortened, quote
from mlx_redrafter.proposers.checkpoint import collect_sources
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.medusa.config import MODEL_TYPE, MedusaConfig
from mlx_redrafter.proposers.stored_config import reading

NameSet = Literal["fasterdecoding", "vllm"]

_VLLM_MODEL_TYPE = "medusa"
_PREFIX = re.compile(r"^(?:medusa_heads?|heads)\.")
_NUMBER = "([0-9]{1,4})"
_BLOCK: Mapping[NameSet, re.Pattern[str]] = {
    "fasterdecoding": re.compile(rf"{_NUMBER}\.{_NUMBER}\.linear\.(weight|bias)"),
    "vllm": re.compile(rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.(weight|bias)"),
}
_FINAL: Mapping[NameSet, re.Pattern[str]] = {
    "fasterdecoding": re.compile(rf"{_NUMBER}\.{_NUMBER}\.weight"),
    "vllm": re.compile(rf"lm_heads\.{_NUMBER}\.weight"),
}
_TOKEN_IDS = ("token_ids", "token_map")
# Our keys by those of published configs, which no tensor may contradict.
_STATED = {
    "hidden_size": "hidden_size",
    "medusa_num_layers": "num_layers",
    "medusa_num_heads": "num_heads",
    "num_heads": "num_heads",
}


def is_medusa(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Return whether a config or tensors are those of Medusa heads.

    A single stack "0.*" can be a recurrent drafter's head as well, whose layers are twice as wide
    as the target's hidden state.
    """
    if config.get("model_type") in (MODEL_TYPE, _VLLM_MODEL_TYPE):
        return True
    if any(key.startswith("medusa") for key in config):
        return True
    if any(name.startswith("medusa_head") or _BLOCK["vllm"].fullmatch(name) for name in shapes):
        return True
    stacks = heads_of(shapes)
    width = {shape[-1:] for name, shape in shapes.items() if name.startswith("0.")}
    return bool(stacks) and (stacks != {0} or width == {(config.get("hidden_size"),)})


def heads_of(names: Iterable[str]) -> set[int]:
    patterns = _BLOCK["fasterdecoding"], _FINAL["fasterdecoding"]
    matches = (pattern.fullmatch(name) for name in names for pattern in patterns)
    return {int(match[1]) for match in matches if match}


def read_heads(
    values: Mapping[str, Any], shapes: Shapes
) -> tuple[MedusaConfig, NameSet, dict[str, str], list[str]]:
    """Read the shape of heads, before their other tensors are compared with it.

    Also return the naming convention, the names there by this package's, and notes for the user.
    """
    bases = [name for name in shapes if name.endswith("embed_tokens.weight")]
    if bases:
        raise CheckpointError(
            f"expected Medusa heads alone, found {quote(bases[0])} of their base as well: "
            "in a Medusa-2 model both were trained, so its heads fit no other base, and mlx-lm "
            "does not load it"
        )
    bare = {name: _PREFIX.sub("", name, count=1) for name in shapes}
    vllm = _BLOCK["vllm"], _FINAL["vllm"]
    is_vllm = any(pattern.fullmatch(name) for name in bare.values() for pattern in vllm)
    name_set: NameSet = "vllm" if is_vllm else "fasterdecoding"
    blocks = filter(None, map(_BLOCK[name_set].fullmatch, bare.values()))
    num_layers = 1 + max((int(match[2]) for match in blocks), default=-1)
    sources, unknown = collect_sources(
        sorted(shapes), lambda name: _own_name(bare[name], name_set, num_layers)
    )
    if unknown:
        names = join_shortened(map(quote, unknown))
        raise CheckpointError(f"found tensors that are not part of Medusa heads: {names}")
    notes: list[str] = []
    if values.get("model_type") == MODEL_TYPE:
        config = MedusaConfig.from_dict(values)
    else:
        config = _infer_config(values, shapes, sources, num_layers, notes)
    return config, name_set, sources, notes


def _own_name(bare: str, name_set: NameSet, num_layers: int) -> str | None:
    if bare in _TOKEN_IDS:
        return _TOKEN_IDS[0]
    if match := _BLOCK[name_set].fullmatch(bare):
        return f"heads.{int(match[1])}.{int(match[2])}.linear.{match[3]}"
    if match := _FINAL[name_set].fullmatch(bare):
        layer = num_layers if name_set == "vllm" else int(match[2])
        return f"heads.{int(match[1])}.{layer}.weight"
    return None


def _infer_config(
    values: Mapping[str, Any],
    shapes: Shapes,
    sources: dict[str, str],
    num_layers: int,
    notes: list[str],
) -> MedusaConfig:
    """Infer the config of published heads; add to ``sources`` the final layer that heads share."""
    num_heads = 1 + max((int(own.split(".")[1]) for own in sources if "." in own), default=-1)
    first = f"heads.0.{num_layers}.weight"
    final = shapes[sources[first]] if first in sources else ()
    if len(final) != 2:
        raise CheckpointError(
            f"expected the final layer of the first head, [vocabulary, hidden size], found "
            f"{list(final) or 'none'}; check that the checkpoint is complete"
        )
    if values.get("original_lm_head") is True:
        for head in range(num_heads):
            sources.setdefault(f"heads.{head}.{num_layers}.weight", sources[first])
    rows, hidden_size = final
    vocab_size = values.get("vocab_size", rows)
    if rows == vocab_size:
        sources.pop(_TOKEN_IDS[0], None)  # of heads that have a row for every token
    elif _TOKEN_IDS[0] not in sources:
        raise CheckpointError(
            f"config.json says vocab_size {vocab_size!r}, but the heads have {rows} rows and no "
            "token_map; use heads and a config of one model"
        )
    found: Any = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}
    _check_stated(values, found, notes)
    with reading("the heads are"):
        return MedusaConfig(
            vocab_size=vocab_size,
            **found,
            bias=any(own.endswith(".bias") for own in sources),
            draft_vocab_size=None if rows == vocab_size else rows,
        )


def _check_stated(values: Mapping[str, Any], found: Mapping[str, int], notes: list[str]) -> None:
    """Compare a published config with the tensors; only the number of heads may be larger here."""
    is_vllm = values.get("model_type") == _VLLM_MODEL_TYPE
    for key, own in (_STATED | ({"num_hidden_layers": "num_layers"} if is_vllm else {})).items():
        stated = values.get(key, found[own])
        if own == "num_heads" and isinstance(stated, int) and stated < found[own]:
            notes.append(f"config.json says {key} {stated}, the file has {found[own]} heads")
        elif stated != found[own]:
            raise CheckpointError(
                f"config.json says {key} {stated!r}, but the tensors are those of {own} "
                f"{found[own]}; check that the checkpoint is complete"
            )

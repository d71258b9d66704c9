"""Conversion of EAGLE heads, and a test of whether one was trained for a target.

Some files name the wrong rotary embedding, so the test tries both: the head's and the target's.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.convert.conversion_options import Conversion, ConversionOptions
from mlx_redrafter.convert.first_drafts import FirstDrafts, compare, decode_texts
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.output import describe_provenance, write_conversion
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.weights import read_weights
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.escaping import join_shortened, quote
from mlx_redrafter.proposers.checkpoint import (
    CONFIG_ONLY,
    check_shapes,
    check_token_ids,
    save_drafter,
)
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import (
    eagle_config,
    is_eagle,
    own_names,
    resolve_offsets,
    rope_of,
    target_of,
)
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.proposers.quantization import quantize_drafter

FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("int32", "int64")


@dataclass(frozen=True)
class EagleTest(FirstDrafts):
    """Results of the test.

    Attributes:
        other_rope: Acceptance with the target's rotary embedding; None if the head has the same.
        other_is_better: Whether it is higher by more than two standard errors of the difference.
    """

    other_rope: float | None = None
    other_is_better: bool = False

    def warning(self) -> str | None:
        """Name the likely mistake; None if the head seems to fit."""
        if not self.other_is_better:
            return super().warning()
        return (
            f"only {self.acceptance:.0%} of the first drafts match the target, but "
            f"{self.other_rope:.0%} do with the target's rotary embedding; give config.json its "
            "rope_theta and rope_scaling and convert again"
        )


def is_eagle_source(source: Source) -> bool:
    """Return whether a checkpoint is an EAGLE head, published or of this package."""
    return is_eagle(source.config, source.tensors)


def describe_eagle(source: Source, eagle: Eagle) -> str:
    """Describe the kind of a head, and the model that its config names."""
    if source.config.get("model_type") == MODEL_TYPE:
        layout = "written by this converter"
    elif "speculators_model_type" in source.config:
        layout = "with speculators' names"
    else:
        layout = "with SafeAILab's names"
    target = target_of(source.config)
    return f"{eagle.config.name} head, {layout}" + (f", for {quote(target)}" if target else "")


def open_eagle(source: Source) -> tuple[Eagle, NamedTensors]:
    """Make a head of the right sizes without its weights, and map their names.

    Raises:
        CheckpointError: Tensors are missing, unexpected, or of other shapes or dtypes than the
            config requires, all of them named; or a value in ``config.json`` is out of range.
    """
    names = own_names(source.tensors)
    shapes = {own: source.tensors[name].shape for own, name in names.items()}
    eagle = build(Eagle, eagle_config(source.config, shapes))
    check_shapes(eagle, shapes, source.name, names)
    problems = [
        f"{quote(name)} is {source.tensors[name].dtype}"
        for own, name in names.items()
        if source.tensors[name].dtype not in (INTEGERS if own == "token_ids" else FLOATS)
    ]
    if problems:
        raise CheckpointError(
            f"expected {', '.join(FLOATS)} (d2t: {' or '.join(INTEGERS)}), but "
            f"{join_shortened(problems)}; use a head that is not quantised"
        )
    left_out = sorted(source.tensors.keys() - names.values())
    notes = [f"not needed, left out: {join_shortened(map(quote, left_out))}"] if left_out else []
    return eagle, NamedTensors("eagle", names, tuple(notes))


def convert_eagle(source: Source, destination: Path, options: ConversionOptions) -> Conversion:
    """Convert an EAGLE head; see `conversion.convert_drafter`."""
    if options.rnn_activation is not None or options.vocabulary is not None:
        raise ConfigError("an EAGLE head has no recurrence, and its vocabulary is not reduced here")
    if "quantization" in source.config:
        raise CheckpointError("expected a head that is not quantised; convert the published one")
    eagle, named = open_eagle(source)
    weights = read_weights(named.sources, source.tensors, options.dtype)
    resolve_offsets(weights, named.sources)
    eagle.load_weights(list(weights.items()))
    check_token_ids(eagle, source.name)
    if options.quantization is not None:
        quantize_drafter(eagle, options.quantization.bits, options.quantization.group_size)
    mx.eval(eagle.parameters())
    eagle.eval()
    measured = None if options.target is None else _test(eagle, options.target)
    test = None if measured is None else asdict(measured)
    provenance = describe_provenance(source, options, named.name_set, test, named.notes)
    warning = None if measured is None else measured.warning()
    return write_conversion(
        destination,
        partial(save_drafter, eagle),
        eagle.config,
        options,
        provenance,
        () if warning is None else (warning,),
    )


def _test(eagle: Eagle, name: str | Path) -> EagleTest:
    target, texts = decode_texts(eagle, name)
    found = compare(eagle, target, texts)
    values = read_config(find_checkpoint(name, CONFIG_ONLY))
    other = with_rope(eagle, rope_of(values.get("text_config", values)))
    if other is None:
        return EagleTest(len(found), sum(found) / len(found))
    others = compare(other, target, texts)
    differences = [new - old for old, new in zip(found, others, strict=True)]
    return EagleTest(
        positions=len(found),
        acceptance=sum(found) / len(found),
        other_rope=sum(others) / len(others),
        other_is_better=sum(differences) > 2 * math.sqrt(sum(map(abs, differences))),
    )


def with_rope(eagle: Eagle, rope: dict[str, Any]) -> Eagle | None:
    """Copy a head with another rotary embedding; return None if it is the same."""
    config = replace(eagle.config, **rope)
    if config == eagle.config:
        return None
    other = copy.deepcopy(eagle)
    other.config = config
    for layer, made in zip(other.layers, build(Eagle, config).layers, strict=True):
        layer.self_attn.rope = made.self_attn.rope
    return other

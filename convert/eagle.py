"""Conversion of EAGLE heads, and the test that tells whether one was trained for a target.

The target decodes a few prompts greedily; at each token the head's first draft is compared with the
target's next token. Files differ on which rotary embedding they say, so both are tried: the head's
and the target's.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.chat import encode_question
from mlx_redrafter.checkpoint import find_checkpoint, read_config, shared_name
from mlx_redrafter.convert.conversion_card import render_conversion_card
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.options import Conversion, ConversionOptions
from mlx_redrafter.convert.publication import CARD_FILE, PROVENANCE_KEY, publish
from mlx_redrafter.convert.selftest import (
    LEAST_ACCEPTANCE,
    PREFILL_STEP_SIZE,
    PROMPTS,
    TOKENS_PER_PROMPT,
)
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.weights import read_weights
from mlx_redrafter.engine import as_proposer
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.host import to_ints
from mlx_redrafter.loading import load
from mlx_redrafter.proposers.eagle.checkpoint import new_eagle, read_eagle_config, save_eagle
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import (
    is_eagle,
    own_names,
    resolve_offsets,
    rope_of,
    target_of,
)
from mlx_redrafter.proposers.redrafter.checkpoint import (
    check_shapes,
    check_token_ids,
    quantize_drafter,
)
from mlx_redrafter.recognition import CONFIG_ONLY
from mlx_redrafter.target.target import Target
from mlx_redrafter.version import __version__
from mlx_redrafter.wording import join_shortened, quote

logger = logging.getLogger(__name__)

FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("int32", "int64")


@dataclass(frozen=True)
class EagleTest:
    """Results of the test.

    Attributes:
        positions: Number of predicted tokens.
        acceptance: Share of them whose first draft is the target's token, 0 to 1.
        other_rope: The same with the target's rotary embedding; None where it is the head's.
        other_is_better: Whether that is clearly more, by two standard errors of the difference.
    """

    positions: int
    acceptance: float
    other_rope: float | None
    other_is_better: bool

    def warning(self) -> str | None:
        """The likely mistake, or None if the head seems to fit."""
        share = f"only {self.acceptance:.0%} of the first drafts match the target"
        if self.other_is_better:
            return (
                f"{share}, but {self.other_rope:.0%} do with the target's rotary embedding; give "
                "config.json its rope_theta and rope_scaling and convert again"
            )
        if self.acceptance < LEAST_ACCEPTANCE:
            return (
                f"{share}; the head was probably trained for another model. Decoding stays exact, "
                "but is not faster"
            )
        return None


def is_eagle_source(source: Source) -> bool:
    """Whether a checkpoint is an EAGLE head, published or of this package."""
    return is_eagle(source.config, source.tensors)


def describe_eagle(source: Source, eagle: Eagle) -> str:
    """The kind of a head, and the model that it says it is for."""
    if source.config.get("model_type") == MODEL_TYPE:
        layout = "written by this converter"
    elif "speculators_model_type" in source.config:
        layout = "with speculators' names"
    else:
        layout = "with SafeAILab's names"
    target = target_of(source.config)
    return f"{eagle.config.name} head, {layout}" + (f", for {quote(target)}" if target else "")


def open_eagle(source: Source) -> tuple[Eagle, NamedTensors]:
    """A head of the right sizes, without its weights, and where these are.

    Raises:
        CheckpointError: Tensors are missing, unexpected, or of other shapes or dtypes than the
            config requires, all of them named; or a value in ``config.json`` is out of range.
    """
    names = own_names(source.tensors)
    shapes = {own: source.tensors[name].shape for own, name in names.items()}
    eagle = new_eagle(read_eagle_config(source.config, shapes))
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
    provenance = {
        "source": source.name,
        "sha256": source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": named.name_set,
        "target": None if options.target is None else shared_name(options.target),
        "self_test": None if measured is None else asdict(measured),
        "notes": list(named.notes),
    }
    with publish(destination) as folder:
        save_eagle(eagle, folder, {PROVENANCE_KEY: provenance})
        stored_as = str(options.quantization or options.dtype)
        name = destination.resolve().name
        card = render_conversion_card(name, eagle.config, stored_as, provenance)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    warning = None if measured is None else measured.warning()
    return Conversion(eagle.config, provenance, () if warning is None else (warning,))


def _test(eagle: Eagle, name: str | Path) -> EagleTest:
    model, tokenizer, _ = load(name)
    target = Target(model)
    as_proposer(eagle).check_fit(target, tokenizer)
    logger.info("decoding %d texts, to see which drafts the target accepts", len(PROMPTS))
    layers = eagle.captured_layers(target)
    prompts = [encode_question(tokenizer, prompt) for prompt in PROMPTS]
    texts = [(*_decode(target, prompt, layers), len(prompt)) for prompt in prompts]
    found = [match for text in texts for match in _compare(eagle, target, *text)]
    values = read_config(find_checkpoint(name, CONFIG_ONLY))
    other = with_rope(eagle, rope_of(values.get("text_config", values)))
    if other is None:
        return EagleTest(len(found), sum(found) / len(found), None, False)
    others = [match for text in texts for match in _compare(other, target, *text)]
    differences = [new - old for old, new in zip(found, others, strict=True)]
    return EagleTest(
        positions=len(found),
        acceptance=sum(found) / len(found),
        other_rope=sum(others) / len(others),
        other_is_better=sum(differences) > 2 * math.sqrt(sum(map(abs, differences))),
    )


def with_rope(eagle: Eagle, rope: dict[str, Any]) -> Eagle | None:
    """The same weights with another rotary embedding; None where it is the same."""
    config = replace(eagle.config, **rope)
    if config == eagle.config:
        return None
    other = copy.deepcopy(eagle)
    other.config = config
    for layer, made in zip(other.layers, new_eagle(config).layers, strict=True):
        layer.self_attn.rope = made.self_attn.rope
    return other


def _decode(target: Target, prompt: list[int], layers: Sequence[int]) -> tuple[list[int], mx.array]:
    """Continue a prompt greedily; all tokens, and the states after all but the last of them."""
    tokens, cache = list(prompt), target.new_cache()
    states: list[mx.array] = []
    ids = mx.array(prompt, dtype=mx.int32)
    outputs = target.prefill(
        ids, cache, PREFILL_STEP_SIZE, lambda done, total: None, layers, states.append
    )
    while True:
        assert outputs.states is not None
        states.append(outputs.states)
        token = mx.argmax(outputs.logits, axis=-1).astype(mx.int32)
        tokens += to_ints(token)
        if len(tokens) > len(prompt) + TOKENS_PER_PROMPT:
            return tokens, mx.concatenate(states)
        outputs = target.advance(token, cache, layers)


def _compare(
    eagle: Eagle, target: Target, tokens: list[int], states: mx.array, num_prompt: int
) -> list[int]:
    """First drafts after each decoded token, 1 where equal to the target's next one, else 0."""
    pairs = eagle.fuse(states[:-1]), target.embed(mx.array(tokens[1:-1]))
    outputs = eagle(*pairs, eagle.make_cache())[num_prompt - 1 :]
    rows = mx.argmax(eagle.logits(outputs, target), axis=-1)
    ids = rows if eagle.row_ids is None else eagle.row_ids[rows]
    return to_ints(ids == mx.array(tokens[num_prompt + 1 :]))

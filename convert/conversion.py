"""Conversion of a foreign checkpoint to an MLX drafter in a new folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint import shared_name
from mlx_redrafter.convert.conversion_card import render_conversion_card
from mlx_redrafter.convert.eagle import convert_eagle, is_eagle_source
from mlx_redrafter.convert.names import map_names
from mlx_redrafter.convert.options import Conversion, ConversionOptions
from mlx_redrafter.convert.publication import CARD_FILE, PROVENANCE_KEY, check_destination, publish
from mlx_redrafter.convert.recognition import recognise_foreign
from mlx_redrafter.convert.selftest import SelfTest, self_test
from mlx_redrafter.convert.shapes import infer_drafter_config
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.convert.vocabulary import choose_rows, count_tokens, slice_head
from mlx_redrafter.convert.weights import read_weights
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.loading import load
from mlx_redrafter.proposers.redrafter.checkpoint import (
    check_token_ids,
    quantize_drafter,
    save_drafter,
)
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.proposer import RecurrentProposer
from mlx_redrafter.target.target import Target
from mlx_redrafter.version import __version__

# Largest number of padding rows of a head, which are padded to multiples of 64 or 128 rows.
MAX_PADDING_ROWS = 127


@dataclass
class _PendingDrafter:
    """A drafter between reading and writing."""

    source: str
    config: DrafterConfig
    weights: dict[str, mx.array]
    name_set: str
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_drafter(
    path_or_repo: str | Path,
    destination: Path,
    options: ConversionOptions | None = None,
) -> Conversion:
    """Convert a recurrent drafter or an EAGLE head; ``destination`` appears whole or not at all.

    Args:
        path_or_repo: Folder or hub repository of the drafter.
        destination: Folder to write: new, empty, or an earlier conversion, which is replaced.
        options: Options of the conversion; by default float16, without a self-test.

    Raises:
        CheckpointError: The source cannot be used or does not fit the target, or ``destination``
            must not be overwritten.
        ConfigError: The options contradict the drafter.
        NonFiniteError: Weights are not finite, or too large for the dtype.
    """
    options = options or ConversionOptions()
    source = open_source(path_or_repo)
    check_destination(destination, source.folder)
    if is_eagle_source(source):
        return convert_eagle(source, destination, options)
    pending = _read(source, options)
    measured = None
    if options.target is None:
        drafter = _build(pending, options)
    else:
        model, tokenizer, _ = load(options.target)
        target = Target(model)
        _fit_vocabulary(pending, target)
        _slice_vocabulary(pending, tokenizer, options)
        drafter = _build(pending, options)
        RecurrentProposer(drafter).check_fit(target, tokenizer)
        measured = _test(pending, drafter, model, tokenizer)
    provenance = _describe_provenance(source, pending, options, measured)
    with publish(destination) as folder:
        save_drafter(drafter, folder, {PROVENANCE_KEY: provenance})
        stored_as = str(options.quantization or options.dtype)
        card = render_conversion_card(
            destination.resolve().name, pending.config, stored_as, provenance
        )
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return Conversion(pending.config, provenance, tuple(pending.warnings))


def _read(source: Source, options: ConversionOptions) -> _PendingDrafter:
    if (kind := recognise_foreign(source)) is not None:
        raise CheckpointError(f"expected a recurrent drafter, found {kind}")
    named = map_names(source.tensors, source.config)
    config = infer_drafter_config(named, source.tensors, source.config, options.rnn_activation)
    weights = read_weights(named, source.tensors, options.dtype)
    pending = _PendingDrafter(source.name, config, weights, named.name_set, list(named.notes))
    if source.config.get("speculators_model_type") == "recurrent_drafting":
        pending.warnings.append(
            "drafters of the speculators fork are trained for one step without recurrence, on "
            "other labels than Apple's; expect few drafts to be accepted"
        )
    return pending


def _build(pending: _PendingDrafter, options: ConversionOptions) -> Drafter:
    drafter = Drafter(pending.config)
    drafter.load_weights(list(pending.weights.items()))
    check_token_ids(drafter, pending.source)
    if options.quantization is not None:
        quantize_drafter(drafter, options.quantization.bits, options.quantization.group_size)
    mx.eval(drafter.parameters())
    drafter.eval()
    return drafter


def _fit_vocabulary(pending: _PendingDrafter, target: Target) -> None:
    """Drop the padding rows of the head, which lie beyond the target's vocabulary."""
    config = pending.config
    extra = config.vocab_size - target.vocab_size
    if not 0 < extra <= MAX_PADDING_ROWS or config.draft_vocab_size is not None:
        return
    head = f"lm_head.{config.num_draft_layers}.weight"
    pending.weights[head] = pending.weights[head][: target.vocab_size]
    pending.config = replace(config, vocab_size=target.vocab_size)
    pending.notes.append(f"{extra} padding rows of the head, beyond the target's tokens, dropped")


def _slice_vocabulary(
    pending: _PendingDrafter, tokenizer: TokenizerWrapper, options: ConversionOptions
) -> None:
    if options.vocabulary is None:
        return
    counts = count_tokens(tokenizer, options.vocabulary.texts, pending.config.vocab_size)
    always = {*tokenizer.eos_token_ids, *tokenizer.all_special_ids}
    rows = choose_rows(counts, always, options.vocabulary.num_rows)
    pending.config = slice_head(pending.config, pending.weights, rows)
    covered = counts[rows].sum() / max(counts.sum(), 1)
    pending.notes.append(f"the head keeps {len(rows)} tokens, {covered:.1%} of those in the texts")


def _test(
    pending: _PendingDrafter, drafter: Drafter, model: nn.Module, tokenizer: TokenizerWrapper
) -> SelfTest:
    measured = self_test(drafter, model, tokenizer)
    warning = measured.warning(pending.config.rnn_activation)
    if warning is not None:
        pending.warnings.append(warning)
    pending.config = drafter.config = measured.calibration.applied(pending.config)
    return measured


def _describe_provenance(
    source: Source, pending: _PendingDrafter, options: ConversionOptions, measured: SelfTest | None
) -> dict[str, Any]:
    return {
        "source": source.name,
        "sha256": source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": pending.name_set,
        "target": None if options.target is None else shared_name(options.target),
        "self_test": None if measured is None else measured.to_dict(),
        "notes": pending.notes,
    }

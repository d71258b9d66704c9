"""Conversion of a foreign checkpoint to an MLX drafter in a new folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.convert.block import convert_block
from mlx_redrafter.convert.conversion_options import Conversion, ConversionOptions
from mlx_redrafter.convert.eagle import convert_eagle
from mlx_redrafter.convert.mtp import convert_mtp, find_mtp
from mlx_redrafter.convert.names import NamedTensors, map_names
from mlx_redrafter.convert.output import ConvertedDrafter, finish, write_conversion
from mlx_redrafter.convert.publication import check_destination
from mlx_redrafter.convert.recognition import has_medusa, recognise_foreign
from mlx_redrafter.convert.selftest import SelfTest, choose_reading, compare_rows, dequantised
from mlx_redrafter.convert.shapes import check_dtypes, infer_drafter_config
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.convert.vocabulary import choose_rows, count_tokens, slice_head
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers import block, eagle
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.proposers.medusa import fit_heads
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.layouts import NamedHeads, read_heads
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter.config import Activation, DrafterConfig
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate, predict
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.target_facts import check_sizes
from mlx_redrafter.target.target import FINAL, Target

# Maximum number of padding rows of a head; heads are padded to multiples of 64 or 128 rows.
MAX_PADDING_ROWS = 127


@dataclass
class _PendingDrafter:
    """A drafter between reading and writing."""

    source: str
    config: DrafterConfig | MedusaConfig
    names: Mapping[str, str]
    weights: dict[str, mx.array]
    name_set: str
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_drafter(
    path_or_repo: str | Path,
    destination: Path,
    options: ConversionOptions | None = None,
) -> Conversion:
    """Convert a drafter of any kind; ``destination`` appears whole or not at all.

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
    module = find_mtp(path_or_repo)
    source = module or open_source(path_or_repo)
    check_destination(destination, source.folder)
    if options.tree is not None and not has_medusa(source):
        raise ConfigError("--tree is for Medusa heads, found another drafter; leave it out")
    is_block = module is None and block.recognise(source.config, source.shapes)
    is_other = module is not None or is_block or eagle.recognise(source.config, source.shapes)
    if is_other and (options.rnn_activation is not None or options.vocabulary is not None):
        raise ConfigError(
            "--rnn-activation and --vocab-slice are not for EAGLE heads, block drafters and MTP "
            "modules; leave them out"
        )
    if module is not None:
        converted = convert_mtp(module, options)
    elif is_block:
        converted = convert_block(source, options)
    elif is_other:
        converted = convert_eagle(source, options)
    else:
        converted = _convert_named(source, options)
    return write_conversion(destination, source, options, converted)


def _convert_named(source: Source, options: ConversionOptions) -> ConvertedDrafter:
    """Convert a recurrent drafter or Medusa heads, whose tensors are found by their names."""
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
        check_sizes(drafter.config, target.hidden_size, target.vocab_size, tokenizer.vocab_size)
        measured = _test(pending, drafter, target, tokenizer, options)
    if isinstance(drafter, Medusa) and options.tree is not None:
        drafter.config = replace(drafter.config, tree=options.tree)
    return ConvertedDrafter(drafter, pending.name_set, measured, pending.notes, pending.warnings)


def _read(source: Source, options: ConversionOptions) -> _PendingDrafter:
    if (kind := recognise_foreign(source)) is not None:
        raise CheckpointError(
            "expected a recurrent or block drafter, an EAGLE head, Medusa heads or an MTP module, "
            f"found {kind}"
        )
    if has_medusa(source):
        return _read_heads(source, options)
    named = map_names(source.tensors, source.config)
    config = infer_drafter_config(named, source.tensors, source.config, options.rnn_activation)
    pending = _pending(source, config, named)
    if source.config.get("speculators_model_type") == "recurrent_drafting":
        pending.warnings.append(
            "drafters of the speculators fork are trained for one step without recurrence and on "
            "other labels than Apple's; expect the target to accept few drafts"
        )
    return pending


def _read_heads(source: Source, options: ConversionOptions) -> _PendingDrafter:
    if options.rnn_activation is not None:
        raise ConfigError(
            "--rnn-activation is for recurrent drafters, found Medusa heads; leave it out"
        )
    found = read_heads(source.config, source.shapes)
    check_dtypes(found.sources, source.tensors)
    config = found.config
    if options.tree == "static" and options.target is None and config.rank_accuracies is None:
        raise ConfigError(
            "a static tree needs --target, to measure how often each rank is accepted"
        )
    return _pending(source, config, found)


def _pending(
    source: Source, config: DrafterConfig | MedusaConfig, named: NamedTensors | NamedHeads
) -> _PendingDrafter:
    names, weights = named.sources, source.read(named.sources)
    return _PendingDrafter(source.name, config, names, weights, named.name_set, list(named.notes))


def _build(pending: _PendingDrafter, options: ConversionOptions) -> Drafter | Medusa:
    config = pending.config
    drafter = Drafter(config) if isinstance(config, DrafterConfig) else Medusa(config)
    drafter.load_weights(list(pending.weights.items()))
    finish(drafter, pending.source, pending.names, options)
    return drafter


def _fit_vocabulary(pending: _PendingDrafter, target: Target) -> None:
    """Drop the padding rows of the head, which follow the target's vocabulary."""
    config = pending.config
    extra = config.vocab_size - target.vocab_size
    if not 0 < extra <= MAX_PADDING_ROWS or config.draft_vocab_size is not None:
        return
    for head in config.head_names:
        pending.weights[head] = pending.weights[head][: target.vocab_size]
    pending.config = replace(config, vocab_size=target.vocab_size)
    pending.notes.append(
        f"{extra} padding rows of the head, which stand for no token of the target, dropped"
    )


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
    pending: _PendingDrafter,
    drafter: Drafter | Medusa,
    target: Target,
    tokenizer: TokenizerWrapper,
    options: ConversionOptions,
) -> SelfTest:
    """Measure how many drafts the target accepts, and choose and calibrate the config."""
    copied = dequantised(drafter)
    if isinstance(copied, Drafter):
        readings = {"as it says": copied}
        if copied.config.rnn and options.rnn_activation is None:
            readings["other recurrence"] = _with_other_recurrence(copied)
        recurrent = choose_reading(readings, target, tokenizer, _compare_recurrent, _last_state)
        texts = [text.observed() for text in recurrent.texts]
        calibration = calibrate(recurrent.network, target.embed, texts)
        drafter.config, matches = calibration.applied(recurrent.network.config), recurrent.matches
        if len(readings) > 1:
            pending.notes.append(recurrent.line)
    else:
        heads = choose_reading(
            {"as it says": copied}, target, tokenizer, _compare_heads, _last_state
        )
        texts, matches = [text.observed() for text in heads.texts], heads.matches
        calibration = fit_heads.calibrate(copied, texts)
        accuracies = fit_heads.rank_accuracies(copied, texts)
        drafter.config = calibration.applied(replace(copied.config, rank_accuracies=accuracies))
    measured = SelfTest.of(matches, calibration)
    pending.warnings += measured.warnings()
    return measured


def _with_other_recurrence(drafter: Drafter) -> Drafter:
    other, config = copy.copy(drafter), drafter.config
    activation: Activation = "identity" if config.rnn_activation == "silu" else "silu"
    other.config = replace(config, rnn_activation=activation)
    return other


def _last_state(network: DraftNetwork) -> Sequence[int]:
    return (FINAL,)


def _compare_recurrent(drafter: Drafter, target: Target, texts: list[ReadSequence]) -> list[int]:
    found = (predict(drafter, target.embed, text.observed())[0] for text in texts)
    return [match for prediction in found for match in compare_rows(drafter, prediction)]


def _compare_heads(heads: Medusa, target: Target, texts: list[ReadSequence]) -> list[int]:
    found = (fit_heads.predict(heads, text.observed())[0] for text in texts)
    return [match for prediction in found for match in compare_rows(heads, prediction)]

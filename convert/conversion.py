"""From a foreign checkpoint to an MLX drafter in a folder of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint import shared_name
from mlx_redrafter.config import Activation, DrafterConfig
from mlx_redrafter.convert.card import model_card
from mlx_redrafter.convert.names import map_names
from mlx_redrafter.convert.publication import CARD_FILE, PROVENANCE_KEY, check_destination, publish
from mlx_redrafter.convert.recognition import foreign_kind
from mlx_redrafter.convert.selftest import SelfTest, self_test
from mlx_redrafter.convert.shapes import drafter_config
from mlx_redrafter.convert.source import Source, open_source
from mlx_redrafter.convert.vocabulary import choose_rows, count_tokens, slice_head
from mlx_redrafter.convert.weights import DTYPES, read_weights
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.generation import check_fit
from mlx_redrafter.loading import load
from mlx_redrafter.proposers.redrafter.checkpoint import (
    check_quantization,
    check_token_ids,
    quantize_drafter,
    save_drafter,
)
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.version import __version__

# Heads are padded to multiples of 64 or 128 rows; more than that is another vocabulary.
MAX_PADDING_ROWS = 127


@dataclass(frozen=True)
class Quantization:
    """How mlx-lm quantises: ``bits`` per weight, a scale and a bias per ``group_size`` weights."""

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        check_quantization(self.bits, self.group_size)

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}"


@dataclass(frozen=True)
class VocabularySlice:
    """The ``num_rows`` most frequent tokens of some text files, by the target's tokenizer."""

    num_rows: int
    texts: tuple[Path, ...]


@dataclass(frozen=True)
class ConversionOptions:
    """What to make of a drafter.

    Attributes:
        dtype: "float16", "bfloat16" or "float32".
        quantization: None leaves the weights as they are.
        target: The model it was trained for, a folder or repository; None skips the self-test.
        rnn_activation: The recurrence, when the origin of the weights does not tell.
        vocabulary: Reduces the head; needs ``target``.
    """

    dtype: str = "float16"
    quantization: Quantization | None = None
    target: str | Path | None = None
    rnn_activation: Activation | None = None
    vocabulary: VocabularySlice | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.vocabulary is not None and (self.target is None or not self.vocabulary.texts):
            raise ConfigError("a vocabulary slice needs a target, for its tokenizer, and texts")


@dataclass(frozen=True)
class Conversion:
    """What came out.

    Attributes:
        config: The drafter's.
        provenance: As it is stored in ``config.json``.
        warnings: What the user should know before using the drafter.
    """

    config: DrafterConfig
    provenance: dict[str, Any]
    warnings: tuple[str, ...]


@dataclass
class _Workpiece:
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
    """Convert a PyTorch or TensorRT-LLM drafter; ``destination`` appears whole or not at all.

    Args:
        path_or_repo: A folder or hub repository with the drafter's weights.
        destination: Folder to write: new, empty, or an earlier conversion, which is replaced.
        options: What to make of it; float16, not tested against a target, by default.

    Raises:
        CheckpointError: The source cannot be used, does not fit the target, or nothing may be
            written to ``destination``.
        ConfigError: Options contradict the drafter.
        NonFiniteError: Weights are not finite, or too large for the dtype.
    """
    options = options or ConversionOptions()
    source = open_source(path_or_repo)
    check_destination(destination, source.folder)
    piece = _read(source, options)
    measured = None
    if options.target is None:
        drafter = _build(piece, options)
    else:
        model, tokenizer, _ = load(options.target)
        target = Target(model)
        _fit_vocabulary(piece, target)
        _slice_vocabulary(piece, tokenizer, options)
        drafter = _build(piece, options)
        check_fit(drafter, target, tokenizer.vocab_size)
        measured = _test(piece, drafter, model, tokenizer)
    provenance = _provenance(source, piece, options, measured)
    with publish(destination) as folder:
        save_drafter(drafter, folder, {PROVENANCE_KEY: provenance})
        stored_as = str(options.quantization or options.dtype)
        card = model_card(destination.resolve().name, piece.config, stored_as, provenance)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return Conversion(piece.config, provenance, tuple(piece.warnings))


def _read(source: Source, options: ConversionOptions) -> _Workpiece:
    if (kind := foreign_kind(source)) is not None:
        raise CheckpointError(f"expected a recurrent drafter, found {kind}")
    named = map_names(source.tensors, source.config)
    config = drafter_config(named, source.tensors, source.config, options.rnn_activation)
    weights = read_weights(named, source.tensors, options.dtype)
    piece = _Workpiece(source.name, config, weights, named.name_set, list(named.notes))
    if source.config.get("speculators_model_type") == "recurrent_drafting":
        piece.warnings.append(
            "drafters of the speculators fork are trained for one step without recurrence, on "
            "other labels than Apple's; expect few drafts to be accepted"
        )
    return piece


def _build(piece: _Workpiece, options: ConversionOptions) -> Drafter:
    drafter = Drafter(piece.config)
    drafter.load_weights(list(piece.weights.items()))
    check_token_ids(drafter, piece.source)
    if options.quantization is not None:
        quantize_drafter(drafter, options.quantization.bits, options.quantization.group_size)
    mx.eval(drafter.parameters())
    drafter.eval()
    return drafter


def _fit_vocabulary(piece: _Workpiece, target: Target) -> None:
    """Drop rows of the head beyond the target's vocabulary, which can only be padding."""
    config = piece.config
    extra = config.vocab_size - target.vocab_size
    if not 0 < extra <= MAX_PADDING_ROWS or config.draft_vocab_size is not None:
        return
    head = f"lm_head.{config.num_draft_layers}.weight"
    piece.weights[head] = piece.weights[head][: target.vocab_size]
    piece.config = replace(config, vocab_size=target.vocab_size)
    piece.notes.append(f"{extra} padding rows of the head, beyond the target's tokens, dropped")


def _slice_vocabulary(
    piece: _Workpiece, tokenizer: TokenizerWrapper, options: ConversionOptions
) -> None:
    if options.vocabulary is None:
        return
    counts = count_tokens(tokenizer, options.vocabulary.texts, piece.config.vocab_size)
    always = {*tokenizer.eos_token_ids, *tokenizer.all_special_ids}
    rows = choose_rows(counts, always, options.vocabulary.num_rows)
    piece.config = slice_head(piece.config, piece.weights, rows)
    covered = counts[rows].sum() / max(counts.sum(), 1)
    piece.notes.append(f"the head keeps {len(rows)} tokens, {covered:.1%} of those in the texts")


def _test(
    piece: _Workpiece, drafter: Drafter, model: nn.Module, tokenizer: TokenizerWrapper
) -> SelfTest:
    measured = self_test(drafter, model, tokenizer)
    warning = measured.warning(piece.config.rnn_activation)
    if warning is not None:
        piece.warnings.append(warning)
    piece.config = drafter.config = measured.calibration.applied(piece.config)
    return measured


def _provenance(
    source: Source, piece: _Workpiece, options: ConversionOptions, measured: SelfTest | None
) -> dict[str, Any]:
    return {
        "source": source.name,
        "sha256": source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": piece.name_set,
        "target": None if options.target is None else shared_name(options.target),
        "self_test": None if measured is None else asdict(measured),
        "notes": piece.notes,
    }

"""Reduction of a drafter's head to the most frequent tokens, which keeps decoding exact.

Most rows of a large vocabulary are never drafted, but all of them are read in every step of
drafting (FR-Spec, arXiv 2502.14856).
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checks import TEXT_ENCODING
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.errors import ConfigError, DataError, explain
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.target.target import Target

# Maximum number of padding rows of a head; heads are padded to multiples of 64 or 128 rows.
MAX_PADDING_ROWS = 127


def fit_head(
    network: DraftNetwork, drafter: ForeignDrafter, target: Target, tokenizer: TokenizerWrapper
) -> None:
    """Fit a network, in place, to the target's vocabulary and to that of the options."""
    options, config = drafter.options, network.config
    extra = config.vocab_size - target.vocab_size
    if 0 < extra <= MAX_PADDING_ROWS and config.draft_vocab_size is None:
        _keep_rows(network, mx.arange(target.vocab_size))
        network.config = config = replace(config, vocab_size=target.vocab_size)
        drafter.notes.append(
            f"{extra} padding rows of the head, which stand for no token of the target, dropped"
        )
    if options.vocab_slice is None:
        return
    counts = count_tokens(tokenizer, options.vocab_text or (), config.vocab_size)
    if not counts.any():
        raise ConfigError("expected text in the files of --vocab-text, found none; give others")
    always = {*tokenizer.eos_token_ids, *tokenizer.all_special_ids}
    rows = choose_rows(counts, always, options.vocab_slice)
    if config.draft_vocab_size is not None:
        raise ConfigError(
            f"expected a drafter with a full head, found one reduced to {config.draft_vocab_size} "
            "tokens; slice the drafter it was made from"
        )
    network.token_ids = mx.array(rows)
    _keep_rows(network, network.token_ids)
    network.config = config.reduced(len(rows))
    covered = counts[rows].sum() / counts.sum()
    drafter.notes.append(f"the head keeps {len(rows)} tokens, {covered:.1%} of those in the texts")


def count_tokens(tokenizer: TokenizerWrapper, texts: Iterable[Path], vocab_size: int) -> np.ndarray:
    """Count the occurrences of each token in text files, int64, shape (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in texts:
        try:
            with path.open(encoding=TEXT_ENCODING) as lines:
                for line in lines:
                    # Silence the warning about lines longer than the model's context.
                    ids = tokenizer.encode(line, add_special_tokens=False, verbose=False)
                    known = [token for token in ids if token < vocab_size]
                    counts += np.bincount(known, minlength=vocab_size)
        except OSError as error:
            raise DataError(f"cannot read {path}: {explain(error)}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path} must be UTF-8 text: {error}; convert the file") from error
    return counts


def choose_rows(counts: np.ndarray, always: Iterable[int], num_rows: int) -> np.ndarray:
    """Choose the ids to keep, ascending: those of ``always``, then the most frequent.

    Of equally frequent tokens the lower id is kept, since tokenizers number tokens by frequency.
    """
    needed = sorted({token for token in always if 0 <= token < len(counts)})
    if not len(needed) < num_rows <= len(counts):
        raise ConfigError(
            f"the vocabulary slice must have more than the {len(needed)} special tokens and at "
            f"most the drafter's {len(counts)}, got {num_rows}"
        )
    ranks = counts.copy()
    ranks[needed] = np.iinfo(np.int64).max
    best = np.argsort(-ranks, kind="stable")[:num_rows]
    return np.sort(best).astype(np.int32)


def _keep_rows(network: DraftNetwork, rows: mx.array) -> None:
    weights = named_parameters(network)
    heads = [(name, weights[name][rows]) for name in network.config.head_names]
    network.load_weights(heads, strict=False)

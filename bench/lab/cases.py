"""Prompts that drafters predict badly: text unlike their training, and a drafter without training.

The texts are in the public domain: Lönnrot's Kalevala, Goethe, Yunus Emre, and English novels. The
source code was written for this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.bench.prompts import Prompt, encode_prompts
from mlx_redrafter.bench.runs import EncodedPrompt
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.redrafter.network import Drafter

RANDOM_TOKENS = "random tokens"
LANGUAGE = "another language"
CODE = "source code"
RANDOM_DRAFTER = "random drafter"
NAMES = (RANDOM_TOKENS, LANGUAGE, CODE, RANDOM_DRAFTER)
NUM_RANDOM_TOKENS = 64
# Minimum number of words left of a text that is used several times.
MIN_WORDS = 8

OTHER_LANGUAGES = (
    """Mieleni minun tekevi, aivoni ajattelevi
lähteäni laulamahan, saa'ani sanelemahan,
sukuvirttä suoltamahan, lajivirttä laulamahan.
Sanat suussani sulavat, puhe'et putoelevat,
kielelleni kerkiävät, hampahilleni hajoovat.""",
    """Habe nun, ach! Philosophie,
Juristerei und Medizin,
Und leider auch Theologie
Durchaus studiert, mit heißem Bemühn.
Da steh ich nun, ich armer Tor!
Und bin so klug als wie zuvor;""",
    """Aşkın aldı benden beni
Bana seni gerek seni
Ben yanarım dün ü günü
Bana seni gerek seni""",  # noqa: RUF001
    """Veli kulta, veikkoseni, kaunis kasvinkumppalini!
Lähe nyt kanssa laulamahan, saa kera sanelemahan
yhtehen yhyttyämme, kahta'alta käytyämme!""",
    """Wer reitet so spät durch Nacht und Wind?
Es ist der Vater mit seinem Kind;
Er hat den Knaben wohl in dem Arm,
Er faßt ihn sicher, er hält ihn warm.""",
    """Ne varlığa sevinirim
Ne yokluğa yerinirim
Aşkın ile avunurum
Bana seni gerek seni""",  # noqa: RUF001
)
SOURCE_CODE = (
    '''def moving_average(values, width):
    """Mean of the last `width` values, one per value."""
    total = 0.0
    means = []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        means.append(total / min(i + 1, width))
    return means


def largest_gap(values):
''',
    '''class Inventory:
    """Counts of parts by name."""

    def __init__(self):
        self.counts = {}

    def add(self, name, count=1):
        self.counts[name] = self.counts.get(name, 0) + count

    def remove(self, name, count=1):
        if self.counts.get(name, 0) < count:
            raise KeyError(f"fewer than {count} of {name}")
''',
    """import csv


def read_table(path):
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["price"] = float(row["price"])
    return sorted(rows, key=lambda row: row["price"])


if __name__ == "__main__":
""",
)
ENGLISH = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity,",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in "
    "my purse, and nothing particular to interest me on shore,",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading,",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife.",
)


@dataclass(frozen=True)
class GuardCase:
    """Prompts, and the drafter that drafts after them.

    Attributes:
        name: Name of the case.
        drafter: The drafter that is measured, or a random one.
        prompt: Function from numbers, 0 and up without end, to prompts.
    """

    name: str
    drafter: Drafter
    prompt: Callable[[int], EncodedPrompt]


def make_cases(
    tokenizer: Any,
    drafter: Drafter,
    use_template: bool,
    seed: int,
    names: Sequence[str] = NAMES,
) -> list[GuardCase]:
    """Make the cases of these names, by default all.

    Args:
        tokenizer: Tokenizer of the target.
        drafter: Drafter of the target.
        use_template: Whether the chat template, if there is one, is applied to texts.
        seed: Random seed of random tokens and random weights.
        names: Names of the cases.

    Raises:
        ConfigError: A name is not the name of a case.
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"case must be one of {', '.join(NAMES)}, got {name!r}")

    def texts(name: str, choice: Sequence[str]) -> Callable[[int], EncodedPrompt]:
        return partial(_text_prompt, tokenizer, name, choice, use_template)

    ids = ordinary_tokens(tokenizer, drafter.config.vocab_size)
    cases = (
        GuardCase(RANDOM_TOKENS, drafter, partial(_random_prompt, ids, seed)),
        GuardCase(LANGUAGE, drafter, texts(LANGUAGE, OTHER_LANGUAGES)),
        GuardCase(CODE, drafter, texts(CODE, SOURCE_CODE)),
        GuardCase(RANDOM_DRAFTER, random_twin(drafter, seed), texts(RANDOM_DRAFTER, ENGLISH)),
    )
    return [case for case in cases if case.name in names]


def ordinary_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Ids below ``vocab_size`` that stand for text.

    Raises:
        ConfigError: There are none.
    """
    special = {
        *tokenizer.eos_token_ids,
        *tokenizer.all_special_ids,
        *tokenizer.get_added_vocab().values(),
    }
    ids = sorted({id for id in tokenizer.get_vocab().values() if id < vocab_size} - special)
    if not ids:
        raise ConfigError(
            f"expected a tokenizer with tokens that are not special, found none among "
            f"{vocab_size}; is it the model's own?"
        )
    return ids


def random_twin(drafter: Drafter, seed: int) -> Drafter:
    """Make a drafter of the same config, dtype and quantisation, with random weights."""
    mx.random.seed(seed)
    twin = Drafter(drafter.config)
    twin.set_dtype(drafter.dtype)
    quantised = {
        name: {"group_size": module.group_size, "bits": module.bits}
        for name, module in drafter.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    nn.quantize(twin, class_predicate=lambda name, _: quantised.get(name, False))
    if drafter.row_ids is not None:
        twin.token_ids = drafter.token_ids
    mx.eval(twin.parameters())
    twin.eval()
    return twin


def _random_prompt(ids: Sequence[int], seed: int, number: int) -> EncodedPrompt:
    rng = np.random.default_rng((seed, number))
    drawn = rng.choice(ids, NUM_RANDOM_TOKENS)
    return EncodedPrompt(str(number), RANDOM_TOKENS, [int(id) for id in drawn])


def _text_prompt(
    tokenizer: Any, case: str, texts: Sequence[str], use_template: bool, number: int
) -> EncodedPrompt:
    """Make prompt ``number`` by repeating the texts; round n leaves out the first n words."""
    text = texts[number % len(texts)]
    left_out = (number // len(texts)) % (len(text.split()) - MIN_WORDS)
    text = text.split(maxsplit=left_out)[-1] if left_out else text
    return encode_prompts(tokenizer, [Prompt(str(number), case, text)], use_template)[0]

"""Table of contexts of one to three tokens: the tokens after them, and those that were probable.

Token Recycling (arXiv 2408.08696) keeps the most probable tokens after the last token; here they
are kept after the last three, two and one. SuffixDecoding (arXiv 2411.04975) drafts from counts in
a suffix tree; here the newest few occurrences of a context count, and know how long they match.
"""

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple

from mlx_redrafter.checks import check_vocabulary
from mlx_redrafter.errors import ConfigError

# Number of most probable tokens after a context, K.
NUM_BEST = 8
# Length of the longest context.
LONGEST = 3
# Number of newest occurrences of a context that are known, and of matches that are followed.
OCCURRENCES = 4
# Length of a match, in tokens, beside which no further ones are looked up.
LONG = 12
# Number of tokens through which matches are followed if many are added at once.
FOLLOWED = 32
# Number of contexts of which the newest are known: that many, or up to twice as many.
MAX_CONTEXTS = 1 << 16
# Token ids, plus 1, fit in so many bits.
BITS = 21

# K token ids, and their log-probabilities.
_ROW = Struct(f"{NUM_BEST}i{NUM_BEST}f")
# Newest row of `_ROW` after a context, or None, and positions of tokens after it.
Entry = tuple[Any, ...]
_NOTHING: Entry = (None,)


class TextEnd(NamedTuple):
    """The end of a text, with or without drafts after it."""

    # Its last three tokens.
    key: int
    # Positions of tokens that followed its end earlier, and the tokens in common before each.
    matches: Sequence[tuple[int, int]]


class Contexts:
    """Table of contexts in the texts that it is given, token by token.

    It knows the newest `MAX_CONTEXTS` to 2 `MAX_CONTEXTS` contexts, and all tokens of the texts,
    with `NO_TOKEN` between texts.
    """

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._waiting = list(text)
        self.end = TextEnd(0, ())
        self._vocab_size: int | None = None
        self._new: dict[int, Entry] = {}
        self._old: dict[int, Entry] = {}

    def check_fit(self, vocab_size: int) -> None:
        """Raise `ConfigError` unless the texts are those of a model with so many token ids."""
        check_vocabulary("history token ids", self._waiting, vocab_size)
        if self._vocab_size not in (None, vocab_size):
            raise ConfigError(
                f"history must be of a model with {vocab_size} token ids, got one of "
                f"{self._vocab_size}; begin with new Contexts() for each model"
            )

    def expect(self, tokens: Sequence[int], vocab_size: int | None = None) -> None:
        """Let the next tokens wait for `index`; a new text's are of a model with so many ids."""
        self._vocab_size = vocab_size or self._vocab_size
        self._waiting += tokens

    def index(self) -> None:
        """Add all tokens that wait for it; matches are followed through the last of them only."""
        waiting, self._waiting = self._waiting, []
        for token in waiting[:-FOLLOWED]:
            self._put_next(token, None)
            self.end = TextEnd(following(self.end.key, token), ())
        for token in waiting[-FOLLOWED:]:
            self.add(token)

    def add(self, token: int, row: bytes | None = None) -> None:
        """Add the next token, and the row of what was probable in its place, if that is known."""
        self._put_next(token, row)
        self.end = self.after(self.end, token)

    def _put_next(self, token: int, row: bytes | None) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        for context in _suffixes(self.end.key):
            newest, *positions = self._entry(context)
            self._put(context, (row or newest, position, *positions[: OCCURRENCES - 1]))

    def teach(self, key: int, row: bytes) -> None:
        """Store a row of what was probable after drafts that end with three tokens."""
        for context in _suffixes(key):
            self._put(context, (row, *self._entry(context)[1:]))

    def after(self, end: TextEnd, token: int) -> TextEnd:
        """Return the end after one more token."""
        key = following(end.key, token)
        tokens, size = self.tokens, len(self.tokens)
        matches = [(p + 1, n + 1) for p, n in end.matches if tokens[p] == token and p + 1 < size]
        if len(matches) < OCCURRENCES and not (matches and matches[0][1] > LONG):
            known = {p for p, _ in matches}
            for order, context in zip(range(LONGEST, 0, -1), _suffixes(key), strict=False):
                if positions := self._entry(context)[1:]:
                    matches += [(p, order) for p in positions if p not in known]
                    break
        return TextEnd(key, matches[:OCCURRENCES])

    def candidates(self, key: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return the K most probable tokens after the longest context with a row, if there is one.

        Natural log-probabilities are beside them, descending.
        """
        for context in _suffixes(key):
            if (row := self._entry(context)[0]) is not None:
                values = _ROW.unpack(row)
                return values[:NUM_BEST], values[NUM_BEST:]
        return (), ()

    def _entry(self, context: int) -> Entry:
        return self._new.get(context) or self._old.get(context, _NOTHING)

    def _put(self, context: int, entry: Entry) -> None:
        self._new[context] = entry
        if len(self._new) >= MAX_CONTEXTS:
            self._new, self._old = {}, self._new


def following(key: int, token: int) -> int:
    """Return the last three tokens of a text after one more token."""
    return (key << BITS | token + 1) & (1 << LONGEST * BITS) - 1


def _suffixes(key: int) -> tuple[int, ...]:
    """Return the contexts of three, two and one tokens at the end of a text."""
    return key, key & (1 << 2 * BITS) - 1, key & (1 << BITS) - 1

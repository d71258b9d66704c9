"""The committed tokens of a sequence: where they end, and those that nobody has taken yet."""

from __future__ import annotations

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.records import Request, Token


class Outbox:
    """Tokens of committed passes until they are taken, and then the reason that no others come.

    Args:
        request: The request, which says at which token to end.
        end_of_prompt: Number of tokens before its first one.

    Attributes:
        num_tokens: Number of all its tokens so far.
        num_cut: Number of tokens of the newest pass that are not the sequence's, as it ends before.
        error: Reason why it cannot go on; None if it can.
    """

    def __init__(self, request: Request, end_of_prompt: int):
        self._request = request
        self.end_of_prompt = end_of_prompt
        self.num_tokens = self.num_cut = 0
        self.error: Exception | None = None
        self._tokens: list[Token] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take, neither tokens nor an error."""
        return not self._tokens and self.error is None

    @property
    def needs_next(self) -> bool:
        """Whether the target has to process the token in flight, too."""
        return self._request.keeps_cache or not self.is_last_next

    @property
    def is_last_next(self) -> bool:
        """Whether the next token is the last one that the request allows."""
        return self.num_tokens + 1 == self._request.max_tokens

    def put(self, newest: Pass) -> bool:
        """Add the tokens of a pass that belong to the sequence; return whether it ends there."""
        rows, found = newest.rows, newest.tokens
        reason, count = self._request.find_end(found, self.num_tokens)
        self.num_tokens += count
        self.num_cut = len(found) - count
        if newest.path is None:  # `squeeze` costs the host less time than an index
            self._tokens.append(Token(found[0], False, newest.log_probs.squeeze(0), reason))
        else:
            for i, (token, row) in enumerate(zip(found[:count], rows, strict=False)):
                end = reason if i == count - 1 else None
                self._tokens.append(Token(token, i < len(rows) - 1, newest.log_probs[row], end))
        return reason is not None

    def fail(self, error: Exception) -> None:
        """Note why the sequence cannot go on behind the tokens that are there."""
        self.error = error

    def take(self) -> list[Token]:
        """Return the tokens, and leave none.

        Raises:
            Exception: The error, if there are no tokens before it.
        """
        tokens, self._tokens = self._tokens, []
        if not tokens and self.error is not None:
            raise self.error
        return tokens

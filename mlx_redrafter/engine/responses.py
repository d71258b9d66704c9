"""From the tokens of a text to mlx-lm's responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.decoding.decode import Scheduler, decode
from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.stats import DecodingStats

logger = logging.getLogger(__name__)


@dataclass
class GenerationResponse(StockResponse):
    """One token of the text and the text it adds: mlx-lm's response with counts of drafting.

    Attributes:
        steps: Verifies so far; the first token belongs to none.
        tokens_per_step: Tokens per verify so far, None before the first.
        stats: All counts of the request, which go on counting.
    """

    steps: int = 0
    tokens_per_step: float | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)


class ResponseStream(Iterator[GenerationResponse]):
    """The responses of one text, one per token, for one thread to read.

    Args:
        text: The text.
        tokenizer: Its tokenizer.
        scheduler: Decoder of several texts; None to decode it alone.
    """

    def __init__(
        self, text: SequenceDecoder, tokenizer: TokenizerWrapper, scheduler: Scheduler | None = None
    ):
        self._text = text
        self._responses = _respond(text, tokenizer, scheduler)

    def __next__(self) -> GenerationResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """End the text soon, from any thread; the thread that reads it sees the stream end."""
        self._text.cancel()

    def close(self) -> None:
        """End the text, from the thread that reads it."""
        self._responses.close()
        if not self.is_closed:  # it has not begun
            self._text.close(0)

    @property
    def num_ready(self) -> int:
        """Responses that come without another step."""
        return self._text.num_ready

    @property
    def is_closed(self) -> bool:
        """Whether the text has ended, and its prompt cache is at rest."""
        return self._text.is_closed

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Responder:
    """Makes responses of a text's tokens, one after the other.

    Args:
        text: The text.
        tokenizer: Its tokenizer.
    """

    def __init__(self, text: SequenceDecoder, tokenizer: TokenizerWrapper):
        self.num_tokens = 0
        self._text = text
        self._detokenizer = tokenizer.detokenizer
        self._num_prompt = len(text.request.prompt)
        self._num_before = text.cache.length + self._num_prompt
        self._start = time.perf_counter()
        self._prompt_tps = 0.0

    def respond(self, token: Token) -> GenerationResponse:
        """The response of the next token."""
        text, detokenizer, limit = self._text, self._detokenizer, self._text.target.context_length
        self.num_tokens += 1
        if self.num_tokens == 1:
            now = time.perf_counter()
            self._prompt_tps, self._start = self._num_prompt / (now - self._start), now
        if limit is not None and self._num_before + self.num_tokens == limit + 1:
            logger.warning(
                "the text is now longer than the model's context of %d tokens; "
                "what follows may be poor",
                limit,
            )
        if token.finish_reason != "stop":
            detokenizer.add_token(token.id)
        if token.finish_reason is not None:
            detokenizer.finalize()
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token.id,
            logprobs=token.log_probs,
            from_draft=token.is_draft,
            prompt_tokens=self._num_prompt,
            prompt_tps=self._prompt_tps,
            generation_tokens=self.num_tokens,
            generation_tps=self.num_tokens / (time.perf_counter() - self._start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=token.finish_reason,
            steps=text.stats.steps,
            tokens_per_step=text.stats.tokens_per_step,
            stats=text.stats,
        )


def _respond(
    text: SequenceDecoder, tokenizer: TokenizerWrapper, scheduler: Scheduler | None
) -> Generator[GenerationResponse, None, None]:
    responder = Responder(text, tokenizer)
    with (
        wired_limit(text.target.model, [generation_stream]),  # type: ignore[list-item]
        closing(decode(text, scheduler)) as tokens,  # type: ignore[type-var]
    ):
        for token in tokens:
            yield responder.respond(token)

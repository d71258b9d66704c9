"""From the tokens of several texts in a batch to mlx-lm's responses."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.decoding.decode import CLEAR_CACHE_EVERY
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine.responses import GenerationResponse, Responder
from mlx_redrafter.engine.scheduler import StepScheduler


class BatchResponse(NamedTuple):
    """One token of one of the texts.

    Attributes:
        number: Number of the text, from 0.
        response: The token, as `Engine.stream` responds with it.
    """

    number: int
    response: GenerationResponse


class BatchStream(Iterator[BatchResponse]):
    """The responses of several texts, as they come, for one thread to read.

    Args:
        passes: Decoder of the texts.
        texts: The texts, none of which has begun.
        tokenizer: Their tokenizer.
        batch_size: Most texts at once.
    """

    def __init__(
        self,
        passes: StepScheduler,
        texts: Iterator[SequenceDecoder],
        tokenizer: TokenizerWrapper,
        batch_size: int,
    ):
        self._passes = passes
        self._texts = enumerate(texts)
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._live: dict[SequenceDecoder, tuple[int, Responder]] = {}
        self._num_steps = 0
        self._is_cancelled = False
        self._responses = self._respond()

    def __next__(self) -> BatchResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """End all texts soon, from any thread; the thread that reads them sees the stream end."""
        self._is_cancelled = True
        for text in list(self._live):
            text.cancel()

    def close(self) -> None:
        """End all texts, from the thread that reads them."""
        self._responses.close()

    def _respond(self) -> Generator[BatchResponse, None, None]:
        with wired_limit(self._passes.model, [generation_stream]):  # type: ignore[list-item]
            try:
                while not self._is_cancelled:
                    room = self._batch_size - len(self._live)
                    if room and (begun := list(islice(self._texts, room))):
                        self._begin(begun)
                    elif not self._live:
                        return
                    else:
                        yield from self._step()
            finally:
                for text in list(self._live):
                    self._end(text)

    def _begin(self, begun: list[tuple[int, SequenceDecoder]]) -> None:
        """Process the prompts of some texts, which the others wait for, but for their ends."""
        for number, text in begun:
            self._live[text] = number, Responder(text, self._tokenizer)
        self._passes.begin([text for _, text in begun])
        for _, text in begun:
            if text.is_finished:
                self._end(text)

    def _step(self) -> Iterator[BatchResponse]:
        self._num_steps += 1
        if self._num_steps % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        for text, tokens, error in self._passes.step_all():
            if error is not None:
                raise error
            number, responder = self._live[text]
            for token in tokens:
                text.stats.num_tokens += 1
                yield BatchResponse(number, responder.respond(token))
            if text.is_finished:
                self._end(text)

    def _end(self, text: SequenceDecoder) -> None:
        del self._live[text]
        self._passes.leave(text)
        text.close(text.stats.num_tokens)

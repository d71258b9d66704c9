"""mlx-lm's responses, made of the tokens of one sequence or of a batch, and locks of caches."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.decoding.delivery import DecodingStats, Token
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import CLEAR_CACHE_EVERY, decode
from mlx_redrafter.engine.memory_guard import MemoryGuard, wire_memory
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.thread_streams import end_streams_with_thread

logger = logging.getLogger(__name__)

# Streams that have begun, and the threads that read them.
_begun: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


def _begin(stream: "ResponseStream | BatchStream") -> None:
    end_streams_with_thread()
    _begun[stream] = threading.current_thread()


@atexit.register
def _close_all() -> None:
    """Close streams while there are modules to do it: Python takes those away when it ends."""
    for stream, thread in list(_begun.items()):
        if thread is threading.current_thread() or not thread.is_alive():
            stream.close()


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

    # A property, as a row that one thread has not computed yet no other one can compute.
    @property  # type: ignore[misc]
    def logprobs(self) -> mx.array:
        """Natural log-probabilities of the token, shape (V,); computed by the thread that reads."""
        found = self._logprobs
        return found if isinstance(found, mx.array) else found()

    @logprobs.setter
    def logprobs(self, given: Any) -> None:
        self._logprobs: mx.array | Callable[[], mx.array] = given


class BatchResponse(NamedTuple):
    """One token of one of several texts, with the number of that text, from 0."""

    number: int
    response: GenerationResponse


class Responder:
    """Makes responses of a sequence's tokens, one after the other."""

    def __init__(self, sequence: SequenceDecoder, tokenizer: TokenizerWrapper):
        self._sequence = sequence
        self._detokenizer = tokenizer.detokenizer
        self._num_prompt = len(sequence.request.prompt)
        self._start = time.perf_counter()
        self._prompt_tps = 0.0
        self._guard = MemoryGuard()

    def respond(self, token: Token) -> GenerationResponse:
        """Make the response of the next token, the last one if memory is used up."""
        stats, detokenizer = self._sequence.delivery.stats, self._detokenizer
        limit, count = self._sequence.target.context_length, stats.num_tokens
        if count == 1:
            now = time.perf_counter()
            self._prompt_tps, self._start = self._num_prompt / (now - self._start), now
        if token.finish_reason == "length" and self._sequence.request.ends_with_context:
            logger.warning("the text ends where the model's context of %d tokens does", limit)
        elif limit is not None and self._sequence.outbox.end_of_prompt + count == limit + 1:
            logger.warning(
                "the text is now longer than the model's context of %d tokens; "
                "what follows may be poor",
                limit,
            )
        finish_reason = token.finish_reason
        if finish_reason is None and self._guard.ends_text(count):
            finish_reason = "length"
        if finish_reason != "stop":
            detokenizer.add_token(token.id)
        if finish_reason is not None:
            detokenizer.finalize()
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token.id,
            logprobs=token.log_probs,  # type: ignore[arg-type]
            from_draft=token.is_draft,
            prompt_tokens=self._num_prompt,
            prompt_tps=self._prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - self._start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            steps=stats.steps,
            tokens_per_step=stats.tokens_per_step,
            stats=stats,
        )


class ResponseStream(Iterator[GenerationResponse], AbstractContextManager["ResponseStream"]):
    """The responses of a sequence, one per token, for one thread; alone without a scheduler."""

    def __init__(
        self,
        sequence: SequenceDecoder,
        tokenizer: TokenizerWrapper,
        scheduler: Scheduler | None = None,
    ):
        self._sequence = sequence
        self._scheduler = scheduler
        # Made when the text begins, as it times the prompt.
        self._responder = cache(partial(Responder, sequence, tokenizer))
        self._responses = _respond(sequence, self._responder, scheduler)
        self._reader: int | None = None

    def __next__(self) -> GenerationResponse:
        thread = threading.get_ident()
        if self._reader not in (None, thread):
            raise ConfigError(
                "a stream belongs to the thread that read it first, found another one; read it in "
                "one thread, such as that of a ThreadPoolExecutor(1)"
            )
        if self._reader is None:
            _begin(self)
        self._reader = thread
        return next(self._responses)

    def cancel(self) -> None:
        """End the text soon, from any thread; the thread that reads it sees the stream end."""
        self._sequence.cancel()

    def close(self) -> None:
        """End the text, from the thread that reads it."""
        self._responses.close()
        if not self.is_closed:  # nobody has read it
            leave = SequenceDecoder.close if self._scheduler is None else self._scheduler.leave
            leave(self._sequence)

    def read_ready(self) -> Iterator[GenerationResponse | None]:
        """Yield the responses, and None while the next one waits for a `Scheduler.advance`."""
        sequence, scheduler = self._sequence, self._scheduler
        assert scheduler is not None, "only a text with a scheduler can wait for others"
        self._responder()
        scheduler.begin([sequence])
        while not sequence.is_closed:
            if sequence.is_ready or sequence.delivery.num_ready:
                yield from islice(self, 1)
            else:
                yield None

    @property
    def is_closed(self) -> bool:
        """Whether the text has ended, and nothing writes to its prompt cache any more."""
        return self._sequence.is_closed

    def __exit__(self, *error: object) -> None:
        self.close()


def _respond(
    sequence: SequenceDecoder,
    responder_of: Callable[[], Responder],
    scheduler: Scheduler | None,
) -> Generator[GenerationResponse, None, None]:
    responder = responder_of()
    calls = () if scheduler is None else (scheduler.step, scheduler.leave)
    with (
        wire_memory(sequence.target.model),
        closing(decode(sequence, *calls)) as tokens,  # type: ignore[type-var]
    ):
        for token in tokens:
            response = responder.respond(token)
            yield response
            if response.finish_reason is not None:
                return


class BatchStream(Iterator[BatchResponse]):
    """The responses of several sequences, as they come, for one thread to read.

    None of the sequences has begun; at most ``batch_size`` of them are decoded at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: Iterator[SequenceDecoder],
        tokenizer: TokenizerWrapper,
        batch_size: int,
    ):
        self._scheduler = scheduler
        self._sequences = enumerate(sequences)
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
        for sequence in list(self._live):
            sequence.cancel()

    def close(self) -> None:
        """End all texts, from the thread that reads them."""
        self._responses.close()

    def _respond(self) -> Generator[BatchResponse, None, None]:
        _begin(self)
        model = self._scheduler.target.model
        with wire_memory(model):
            try:
                while not self._is_cancelled:
                    room = self._batch_size - len(self._live)
                    if room and (begun := list(islice(self._sequences, room))):
                        self._begin(begun)
                    elif not self._live:
                        return
                    else:
                        yield from self._step()
            finally:
                for sequence in list(self._live):
                    self._end(sequence)

    def _begin(self, begun: list[tuple[int, SequenceDecoder]]) -> None:
        for number, sequence in begun:
            self._live[sequence] = number, Responder(sequence, self._tokenizer)
        self._scheduler.begin([sequence for _, sequence in begun])

    def _step(self) -> Iterator[BatchResponse]:
        self._num_steps += 1
        if self._num_steps % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        for sequence in self._scheduler.step_all():
            number, responder = self._live[sequence]
            is_last = sequence.is_finished
            for token in sequence.delivery.deliver(sequence.take()):
                response = responder.respond(token)
                yield BatchResponse(number, response)
                if response.finish_reason is not None:
                    is_last = True
                    break
            if is_last:
                self._end(sequence)

    def _end(self, sequence: SequenceDecoder) -> None:
        del self._live[sequence]
        self._scheduler.leave(sequence)


class CacheLocks:
    """Streams by the prompt caches that they write to, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakKeyDictionary[Any, weakref.ref[ResponseStream]] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, layers: Sequence[Any]) -> None:
        """Raise `ConfigError` if a stream has one of the caches, or if two layers are one."""
        if len(set(map(id, layers))) < len(layers):
            raise ConfigError(
                "prompt_cache has one cache object in several layers; make it with "
                "mlx_lm.models.cache.make_prompt_cache(model)"
            )
        streams = [known() for known in map(self._streams.get, layers) if known is not None]
        if any(stream is not None and not stream.is_closed for stream in streams):
            raise ConfigError(
                "prompt_cache is in use by a text that has not ended; read that one to its end or "
                "close it, or give a copy of the cache"
            )

    def claim(self, layers: Sequence[Any], stream: ResponseStream) -> None:
        """Lock caches for a stream, after a `check`, until it is closed or nobody refers to it."""
        with self._lock:
            self.check(layers)
            for layer in layers:
                self._streams[layer] = weakref.ref(stream)

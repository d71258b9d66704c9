"""One request in the worker: it writes its texts one after the other."""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.decoding.processors import LogitsProcessor
from mlx_redrafter.engine.prompt_encoding import limit_text
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.server.counters import Counters
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Answer, Part, score_prompt
from mlx_redrafter.server.prefixes import Prefix
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import CompletionRequest, TextRequest

# A part of a reply, or its end, which is an error if the request has failed.
Item = Part | Refusal | None

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request and its place in the worker, which sets ``counters`` to its own.

    Attributes:
        receive: Function called with the parts of every step, and at the end.
        owner: Identity of the client, whose prompts no other client may use.
        num_cached: Number of prompt tokens found in a cache.
        is_cancelled: Whether the client has gone, or the server ends.
    """

    model: LoadedModel
    request: TextRequest
    prompts: list[list[int]]
    receive: Callable[..., None]
    owner: str = ""
    counters: Counters = field(default_factory=Counters)
    num_cached: int = 0
    is_cancelled: bool = False
    _stream: ResponseStream | None = None

    def __post_init__(self) -> None:
        self._parts = self._write_all()

    def cancel(self) -> None:
        """End the request soon; may be called from any thread."""
        self.is_cancelled = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def step(self) -> bool:
        """Send the parts that are there; return whether the request goes on."""
        parts: list[Part] = []
        try:
            for part in self._parts:
                if part is None:
                    return True
                parts.append(part)
        finally:
            if parts:
                self.receive(*parts)
        return False

    def close(self) -> None:
        """End the request, in the worker's thread."""
        self._parts.close()

    def _write_all(self) -> Generator[Part | None]:
        for i in range(len(self.prompts) * self.request.num_texts):
            if self.is_cancelled:
                return
            yield from self._write(i)

    def _write(self, index: int) -> Generator[Part | None]:
        """Yield the parts of one text, and None while the next one needs a scheduler's step."""
        request = self.request
        tokens = list(self.prompts[index // request.num_texts])
        answer = Answer(request, self.model.engine.tokenizer, tokens, index)
        self.counters.totals["prompt_tokens_total"] += len(tokens)
        if isinstance(request, CompletionRequest) and request.echoes:
            yield from self._repeat(answer, tokens, index)
            if request.ends_there:
                return
        yield from self._decode(answer, tokens, index)

    def _decode(self, answer: Answer, tokens: list[int], index: int) -> Generator[Part | None]:
        """Yield the generated parts of a text, whose tokens join those of the prompt.

        Keeps its cache, even if the text is cancelled.
        """
        num_prompt, prefix = len(tokens), self._take_prefix(tokens, index)
        end, stats = "failed", DecodingStats()
        try:
            self._stream = self._begin(tokens, prefix, index)
            if self.is_cancelled:  # before the stream existed
                self._stream.cancel()
            with self._stream as stream:
                for response in stream.read_ready():
                    if response is None:
                        yield None
                        continue
                    stats = response.stats
                    tokens.append(response.token)
                    part = answer.add(response)
                    yield part
                    if part.finish_reason:
                        end = part.finish_reason
                        break
                else:
                    end = "cancelled"
            self.model.prefixes.keep(tokens, num_prompt, prefix, self.owner)
        except GeneratorExit:
            end = "cancelled"
            raise
        except NonFiniteError as error:
            if self.request.grammar is None:
                raise
            param = "tools" if self.request.format is None else self.request.format.param
            raise Refusal(
                f"{param}: no token may follow the text so far: nothing fits the schema, it is too "
                "complex, or the model's logits are NaN; correct or simplify the schema",
                param,
            ) from error
        finally:
            self._count(end, stats)

    def _take_prefix(self, tokens: list[int], index: int) -> Prefix:
        prefix = self.model.prefixes.take(tokens, self.owner)
        if index % self.request.num_texts == 0:
            self.num_cached += prefix.length
        totals = self.counters.totals
        totals["cached_tokens_total"] += prefix.length
        totals["prefix_hits_total"] += prefix.length > 0
        return prefix

    def _begin(self, tokens: list[int], prefix: Prefix, index: int) -> ResponseStream:
        request, seed = self.request, self.request.options.seed
        options = replace(
            request.options,
            seed=None if seed is None else (seed + index) % 2**32,
            max_tokens=limit_text(request.options.max_tokens, self.model.context - len(tokens)),
        )
        return self.model.engine.stream(
            tokens[prefix.length :],
            prompt_cache=prefix.cache,
            history=prefix.contexts,
            logits_processors=_penalties(request, tokens[: prefix.length]),
            grammar=request.grammar,
            prompt_progress_callback=lambda done, total: prefix.note(done),
            prompt_chunk_size=prefix.left if prefix.stops else None,
            shared=self.model.scheduler,
            **vars(options),
        )

    def _count(self, end: str, stats: DecodingStats) -> None:
        totals = self.counters.totals
        self.counters.texts[end] += 1
        totals["generated_tokens_total"] += stats.num_tokens
        totals["steps_total"] += stats.steps
        totals["drafts_total"] += stats.num_verified - stats.steps
        totals["accepted_drafts_total"] += stats.num_accepted
        self.model.num_steps += stats.steps
        self.model.num_accepted += stats.num_accepted
        if stats.shapes:
            logger.debug("drafts, found (expected): %s", "; ".join(map(str, stats.shapes)))

    def _repeat(self, answer: Answer, tokens: list[int], index: int) -> Generator[Part | None]:
        """Yield the part that repeats the prompt of a text, and None between its chunks.

        Others get as much time as each chunk has taken.
        """
        request, engine = self.request, self.model.engine
        assert isinstance(request, CompletionRequest)
        prompt = request.prompts[index // request.num_texts]
        text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(tokens)
        scores, start = [], time.perf_counter()
        if request.top_logprobs is not None:
            for chunk in score_prompt(engine, tokens, request.top_logprobs):
                scores += chunk
                now = time.perf_counter()
                end = now + (now - start)
                yield None
                while self.model.scheduler.is_decoding and time.perf_counter() < end:
                    yield None
                if self.is_cancelled:
                    break
                start = time.perf_counter()
        part = answer.repeat(text, tokens[0], scores)
        part.finish_reason = "length" if request.ends_there else None
        yield part


def _penalties(request: TextRequest, known: list[int]) -> list[LogitsProcessor]:
    """Make logits processors that also see the tokens in the cache."""
    before = mx.array(known, dtype=mx.int32)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)

    return [seeing_all(one) for one in make_logits_processors(**request.penalties)]

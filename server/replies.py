"""Replies in OpenAI's format, streamed or whole, for as long as the client is connected."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_redrafter.server.job import Job
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Part, TokenLogprob
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest, TextRequest

# HTTP status of a reply whose client has disconnected, as nginx logs it.
CLIENT_CLOSED_REQUEST = 499


class Reply:
    """The reply to one request.

    Args:
        loaded: Model that writes the texts.
        request: The request.
        prompts: Token ids of its prompts.
        model: Name of the model.

    Attributes:
        job: The request's place in the worker, which sends the parts of the reply.
    """

    def __init__(
        self, loaded: LoadedModel, request: TextRequest, prompts: list[list[int]], model: str
    ):
        self.job = Job(loaded, request, prompts, self._receive)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Part | Refusal | None] = asyncio.Queue()
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._is_chat and request.is_streamed else kind,
            "created": int(time.time()),
            "model": model,
        }
        # Parts so far, added up, by the index of their text.
        self._texts: dict[int, Part] = {}

    async def events(self) -> AsyncIterator[str]:
        """Yield the reply as server-sent events."""
        try:
            async for part in self._parts():
                chunk = self._chunk(part)
                if chunk is not None:
                    yield _event(chunk)
        except Refusal as refusal:
            yield _event(refusal.to_json())
            return
        if self.job.request.shows_usage:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def whole(self, client: Request) -> Response:
        """Return the reply in one piece, or end its texts once the client has disconnected.

        Raises:
            Refusal: The request has failed.
        """

        async def collect() -> None:
            async for part in self._parts():
                self._add(part)

        async def wait_until_disconnected() -> None:
            while (await client.receive())["type"] != "http.disconnect":
                pass

        collecting = asyncio.create_task(collect())
        waiting = asyncio.create_task(wait_until_disconnected())
        try:
            await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            collecting.result()
        finally:
            self.job.cancel()
            collecting.cancel()
            waiting.cancel()
        texts = [self._texts[index] for index in sorted(self._texts)]
        choices = [self._choice(text, "message", None) for text in texts]
        return respond({**self._head, "choices": choices, "usage": self._usage()})

    def _receive(self, item: Part | Refusal | None) -> None:
        """Accept a part, an error or the end; called in the worker's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def _parts(self) -> AsyncIterator[Part]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Refusal):
                raise item
            yield item

    def _add(self, part: Part) -> None:
        before = self._texts.get(part.index)
        self._texts[part.index] = part if before is None else before + part

    def _chunk(self, part: Part) -> dict[str, Any] | None:
        """Add a part and return its event; return None if it has nothing to show."""
        choice = self._choice(part, "delta", self._texts.get(part.index))
        self._add(part)
        if not (part.finish_reason or part.has_content):
            return None
        request = self.job.request
        if request.shows_drafts:
            choice["is_draft"] = part.is_draft
            choice["tokens"], choice["steps"] = part.num_tokens, part.num_steps
        usage = {"usage": None} if request.shows_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(self, part: Part, name: str, before: Part | None) -> dict[str, Any]:
        """Format a whole choice (``message``), or the next part of one (``delta``)."""
        choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason}
        shows_logprobs = self.job.request.top_logprobs is not None
        if not self._is_chat:
            offset = 0 if before is None else len(before.content)
            logprobs = _completion_logprobs(part.logprobs, offset) if shows_logprobs else None
            return {**choice, "text": part.content, "logprobs": logprobs}
        message: dict[str, Any] = {"content": part.content}
        if before is None:
            message["role"] = "assistant"
        if name == "message" and part.tool_calls and not part.content:
            message["content"] = None
        if part.reasoning:
            message["reasoning"] = part.reasoning
        if part.tool_calls:
            first = 0 if before is None else len(before.tool_calls)
            message["tool_calls"] = [
                {"index": i, **call} if name == "delta" else call
                for i, call in enumerate(part.tool_calls, first)
            ]
        logprobs = {"content": list(map(_chat_logprobs, part.logprobs))} if shows_logprobs else None
        return {**choice, name: message, "logprobs": logprobs}

    def _usage(self) -> dict[str, Any]:
        texts = self._texts.values()
        num_prompt = sum(map(len, self.job.prompts))
        num_tokens = sum(text.num_tokens for text in texts)
        num_accepted = sum(text.num_accepted for text in texts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.job.num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": sum(text.num_drafts for text in texts) - num_accepted,
            },
        }


class EventStream(StreamingResponse):
    """A reply as a stream of events, whose texts end once the client has disconnected."""

    def __init__(self, reply: Reply):
        headers = {"Cache-Control": "no-cache"}
        super().__init__(reply.events(), headers=headers, media_type="text/event-stream")
        self._job = reply.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def respond(
    value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Make a JSON response."""
    return Response(_to_text(value), status, headers, "application/json")


def _event(value: dict[str, Any]) -> str:
    return f"data: {_to_text(value)}\n\n"


def _to_text(value: dict[str, Any]) -> str:
    """Write JSON in ASCII characters, which any text can be encoded in."""
    return json.dumps(value, allow_nan=False)


def _chat_logprobs(token: TokenLogprob) -> dict[str, Any]:
    return {**_shown(token), "top_logprobs": list(map(_shown, token.top))}


def _shown(token: TokenLogprob) -> dict[str, Any]:
    is_whole = "\ufffd" not in token.text
    raw = list(token.text.encode()) if is_whole else None
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}


def _completion_logprobs(tokens: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """Format log-probabilities for completions; the offsets count characters of the text."""
    texts = [token.text for token in tokens]
    ends = list(accumulate(map(len, texts), initial=offset))
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{one.text: one.logprob for one in token.top} for token in tokens],
        "text_offset": ends[:-1],
    }

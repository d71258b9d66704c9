"""Replies in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from itertools import accumulate
from typing import Any

from mlx_redrafter.server.job import Job
from mlx_redrafter.server.parts import Part, TokenLogprob, TokenLogprobs
from mlx_redrafter.server.requests import ChatRequest


class Reply:
    """The reply to one request, part by part and whole.

    Args:
        job: The request and its prompts.
        model: Name of the model.
    """

    def __init__(self, job: Job, model: str):
        self._job = job
        self._is_chat = isinstance(job.request, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._is_chat and job.request.is_streamed else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._texts: dict[int, Part] = {}

    def add(self, part: Part) -> None:
        """Take a part of the reply."""
        before = self._texts.get(part.index)
        self._texts[part.index] = part if before is None else before + part

    def whole(self) -> dict[str, Any]:
        """The reply of all parts."""
        texts = [self._texts[index] for index in sorted(self._texts)]
        choices = [self._choice(text, "message", None) for text in texts]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def chunk(self, part: Part) -> dict[str, Any] | None:
        """Take a part; what of it is sent in a stream, None for nothing."""
        before = self._texts.get(part.index)
        choice = self._choice(part, "delta", before)
        self.add(part)
        if not (part.finish_reason or part.says_something):
            return None
        request = self._job.request
        if request.shows_drafts:
            choice["is_draft"] = part.is_draft
            choice["tokens"], choice["steps"] = part.num_tokens, part.num_steps
        usage = {"usage": None} if request.shows_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def last_chunk(self) -> dict[str, Any]:
        """The part of a stream that is the usage."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def _choice(self, part: Part, name: str, before: Part | None) -> dict[str, Any]:
        """A choice, or what a part adds to it."""
        choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason}
        shows_logprobs = self._job.request.top_logprobs is not None
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
        texts, job = self._texts.values(), self._job
        num_prompt = sum(map(len, job.prompts))
        num_tokens = sum(text.num_tokens for text in texts)
        num_accepted = sum(text.num_accepted for text in texts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": job.num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": sum(text.num_drafts for text in texts) - num_accepted,
            },
        }


def _chat_logprobs(token: TokenLogprobs) -> dict[str, Any]:
    return {**_shown(token.chosen), "top_logprobs": list(map(_shown, token.top))}


def _shown(token: TokenLogprob) -> dict[str, Any]:
    is_whole = "\ufffd" not in token.text
    raw = list(token.text.encode()) if is_whole else None
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}


def _completion_logprobs(tokens: list[TokenLogprobs], offset: int) -> dict[str, Any]:
    """Log-probabilities in the shape of completions; the offsets are those of the tokens' texts."""
    texts = [token.chosen.text for token in tokens]
    ends = list(accumulate(map(len, texts), initial=offset))
    return {
        "tokens": texts,
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [{one.text: one.logprob for one in token.top} for token in tokens],
        "text_offset": ends[:-1],
    }

"""The parts of an answer: content, reasoning and tool calls, read from the generated text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.engine.responses import GenerationResponse
from mlx_redrafter.server.requests import ChatRequest, TextRequest

# Log-probability of a token with probability 0 in nats, since JSON has no infinity. As at OpenAI.
MIN_LOGPROB = -9999.0


class TokenLogprob(NamedTuple):
    """A token's text and its natural log-probability.

    Attributes:
        text: The text of the token.
        logprob: Its log-probability.
        top: The most probable tokens at this position.
    """

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass
class Part:
    """The addition of one token to an answer, or of several.

    Attributes:
        index: Index of the text in its request.
        is_draft: Whether the newest token is an accepted draft.
        num_tokens: Tokens of the text so far.
        num_accepted: Accepted drafts among the tokens of this part.
        num_drafts: Drafts verified for the text so far.
        num_steps: Forward passes after the prompt so far.
        content: Text for the reader.
        reasoning: Text of the model's thinking.
        tool_calls: Tool calls in OpenAI's format.
        logprobs: Tokens with their log-probabilities.
        finish_reason: "stop", "length" or "tool_calls" on the last part, else None.
    """

    index: int
    is_draft: bool
    num_tokens: int
    num_accepted: int
    num_drafts: int
    num_steps: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether it has anything to show to the client."""
        return bool(self.content or self.reasoning or self.tool_calls or self.logprobs)

    def __add__(self, later: Part) -> Part:
        """Join this part and the next one; the lists of this one grow."""
        self.tool_calls += later.tool_calls
        self.logprobs += later.logprobs
        return replace(
            later,
            num_accepted=self.num_accepted + later.num_accepted,
            content=self.content + later.content,
            reasoning=self.reasoning + later.reasoning,
            tool_calls=self.tool_calls,
            logprobs=self.logprobs,
        )


class Answer:
    """The parts of one text, read from its tokens.

    Args:
        request: The request.
        tokenizer: Tokenizer of the model.
        prompt: Token ids of the prompt.
        index: Index of the text in its request.
    """

    def __init__(
        self, request: TextRequest, tokenizer: TokenizerWrapper, prompt: list[int], index: int
    ):
        self._request = request
        self._tokenizer = tokenizer
        self._index = index
        stops = {"normal": [(stop, None) for stop in request.stops]}
        self._stopping = TextStateMachine(stops).make_state()
        # With a grammar there is neither thinking nor a tool call.
        is_chat = isinstance(request, ChatRequest) and request.grammar is None
        machine = make_text_state_machine(tokenizer) if is_chat else TextStateMachine()
        self._kind = _first_kind(tokenizer, prompt) if is_chat else "normal"
        self._machine = machine.make_state(self._kind)
        self._call, self._has_called = "", False

    def add(self, response: GenerationResponse) -> Part:
        """Return the part that a token adds, which is the last one after a stop string."""
        part = Part(
            index=self._index,
            is_draft=response.from_draft,
            num_tokens=response.generation_tokens,
            num_accepted=int(response.from_draft),
            num_drafts=response.stats.num_verified - response.steps,
            num_steps=response.steps,
        )
        if self._request.top_logprobs is not None and response.finish_reason != "stop":
            part.logprobs = [self._read_logprobs(response, self._request.top_logprobs)]
        self._stopping, segments = TextStateMachine.split(self._stopping, response.text)
        text = "".join(text for _, text in segments)
        is_stopped = self._stopping[0] is None
        part.finish_reason = "stop" if is_stopped else response.finish_reason
        if response.finish_reason and not is_stopped:
            text += TextStateMachine.flush(self._stopping)[1]
        self._machine, segments = TextStateMachine.split(self._machine, text)
        if part.finish_reason:
            segments.append((self._machine[0], TextStateMachine.flush(self._machine)[1]))
        for kind, text in segments:
            self._sort(part, kind, text)
        if part.finish_reason:
            self._end_call(part, None)  # the text ended before the call did
            if self._has_called and part.finish_reason == "stop":
                part.finish_reason = "tool_calls"
        return part

    def _sort(self, part: Part, kind: str, text: str) -> None:
        if kind != "tool":
            self._end_call(part, self._tokenizer.tool_call_end)
        self._kind = kind
        if kind == "tool":
            self._call += text
        elif kind == "reasoning":
            part.reasoning += text
        elif kind == "normal":  # others are headers
            part.content += text

    def _end_call(self, part: Part, mark: str | None) -> None:
        """Parse the tool call that has ended, if one has; a malformed one is added as text."""
        if self._kind != "tool":
            return
        text, self._call, self._kind = self._call, "", "normal"
        tools = self._request.tools if isinstance(self._request, ChatRequest) else []
        calls = _read_calls(self._tokenizer, text, tools) if tools else []
        part.tool_calls += calls
        self._has_called |= bool(calls)
        if not calls:
            part.content += f"{self._tokenizer.tool_call_start or ''}{text}{mark or ''}"

    def _read_logprobs(self, response: GenerationResponse, num_top: int) -> TokenLogprob:
        log_probs = response.logprobs.astype(mx.float32)
        ids = [response.token]
        if num_top:
            ids += to_ints(mx.argsort(-log_probs)[:num_top])
        values = to_floats(log_probs[mx.array(ids)])
        chosen, *top = (
            TokenLogprob(_token_text(self._tokenizer, token), max(value, MIN_LOGPROB))
            for token, value in zip(ids, values, strict=True)
        )
        return chosen._replace(top=tuple(top))


def _token_text(tokenizer: TokenizerWrapper, token: int) -> str:
    """Decode a token as it stands within a text; U+FFFD for a part of a character."""
    detokenizer = tokenizer.detokenizer
    # At the beginning of a text, tokenizers leave out the blank of the first token.
    for first in tokenizer.encode("a", add_special_tokens=False):
        detokenizer.add_token(first)
    before = len(detokenizer.text)
    detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text[before:]


def _first_kind(tokenizer: TokenizerWrapper, prompt: list[int]) -> str:
    """Return the kind of text after a chat's prompt, which may have begun the reasoning."""
    if tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    is_open = tokenizer.has_thinking and (
        tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
    )
    return "reasoning" if is_open else "normal"


def _read_calls(
    tokenizer: TokenizerWrapper, text: str, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Parse the tool calls in a text; return none if it is malformed."""
    try:
        parsed = tokenizer.tool_parser(text, tools)
        return [
            {
                "id": call.get("id") or f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {
                    "name": str(call["name"]),
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for call in (parsed if isinstance(parsed, list) else [parsed])
        ]
    except Exception:  # mlx-lm's parsers raise exceptions of any kind for malformed calls
        return []

"""Anthropic's ``/v1/messages``, with tools, thinking and streams, and its count of tokens."""

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.answer_grammar import AnswerFormat
from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.fields import Fields, event, read_text, respond
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.conversation import BREAK, Conversation
from mlx_redrafter.server.protocols.openai_chat import read_effort
from mlx_redrafter.server.protocols.openai_fields import read_format, read_options, read_stops
from mlx_redrafter.server.protocols.service import MakeWriter, Routes, Service
from mlx_redrafter.server.protocols.writer import BlockWriter, Usage
from mlx_redrafter.server.refusals import KINDS, ContextExceeded, Refusal
from mlx_redrafter.server.requests import ChatRequest
from mlx_redrafter.server.tools import Tools, read_tools

# Fields that do not change the text: Anthropic caches, bills, attributes or trims requests by them.
_IGNORED = (
    "cache_control", "container", "context_management", "inference_geo", "metadata",
    "service_tier",
)  # fmt: skip
# Tools that run at Anthropic, by the beginning of their type. The model is not shown them.
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_")
# Beginning of a line about billing in the system prompt of Claude Code. It differs from session to
# session, so that no two sessions could share a prompt cache.
_BILLING = "x-anthropic-billing-header:"
# Kinds of Anthropic's errors by HTTP status; all others are bad requests.
_KINDS = {**KINDS, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Types and fields of the deltas of a block, by its kind.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
# Fields of a block at its beginning, by its kind.
_EMPTY = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
# Signature of thinking. Anthropic's is a proof, and some clients drop thinking without one.
SIGNATURE = "unsigned"


async def count(service: Service, client: Request) -> Response:
    request, _ = await service.read(client, partial(read, counts=True))
    return respond({"input_tokens": await service.count(client, request)})


def to_error(refusal: Refusal) -> dict[str, Any]:
    message = str(refusal)
    if isinstance(refusal, ContextExceeded):  # clients look for these words
        message = (
            f"prompt is too long: {refusal.length} tokens > {refusal.context - 1} maximum; "
            f"shorten {refusal.param}"
        )
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def read(
    body: object, defaults: GenerationOptions, counts: bool = False
) -> tuple[ChatRequest, MakeWriter]:
    """Read a body; one that only ``counts`` tokens may end with an answer's beginning."""
    fields = Fields(body)
    fields.take(*_IGNORED)
    conversation = Conversation()
    kept = [text for text in fields.texts("system") if not text.startswith(_BILLING)]
    if kept:
        conversation.add_text("system", BREAK.join(kept))
    _read_messages(fields, conversation)
    messages = conversation.messages
    roles = [one["role"] for one in messages]
    if not counts and roles[-1:] in ([], ["assistant"]):
        raise Refusal(
            "messages must end with a message of the user; the model cannot go on with an answer",
            "messages",
        )
    effort, asked = _read_output(fields)
    request = ChatRequest(
        model=fields.typed("model", str),
        options=read_options(fields, defaults, "max_tokens"),
        is_streamed=fields.typed("stream", bool) or False,
        stops=read_stops(fields, "stop_sequences"),
        format=asked,
        messages=messages,
        tools=_read_tools(fields),
        template_options=_read_thinking(fields),
        effort=effort,
    )
    fields.finish()
    return request, MessageWriter


class MessageWriter(BlockWriter):
    def __init__(self, model: str):
        super().__init__(model)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._has_begun = False
        # Number of blocks before the newest one.
        self._index = -1

    def begin(self) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            start = {"type": "message_start", "message": self._message()}
            yield event(start, "message_start")

    def open_block(self, call: ToolCall | None) -> Iterator[str]:
        self._index += 1
        block = {"type": self.kind, **_EMPTY[self.kind]} if call is None else _begin_call(call, {})
        yield self._event("content_block_start", content_block=block)

    def extend(self, text: str) -> Iterator[str]:
        name, field = _DELTAS[self.kind]
        yield self._event("content_block_delta", delta={"type": name, field: text})

    def close_block(self) -> Iterator[str]:
        if self.kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._event("content_block_delta", delta=delta)
        yield self._event("content_block_stop")

    def finish(self) -> Iterator[str]:
        end = {"delta": _end_of(self.last), "usage": _format_usage(self.usage())}
        yield event({"type": "message_delta", **end}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield event(to_error(refusal), "error")

    def keep_alive(self) -> Iterator[str]:
        yield from self.begin()
        if not self.kind:
            self.kind = "text"
            yield from self.open_block(None)
        yield from self.extend("")

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        text = texts[0]
        content: list[dict[str, Any]] = []
        if text.reasoning:
            thinking = {"thinking": text.reasoning, "signature": SIGNATURE}
            content.append({"type": "thinking", **thinking})
        if text.content:
            content.append({"type": "text", "text": text.content})
        for call in text.tool_calls:
            if call.parsed is not None:
                content.append(_begin_call(call, call.parsed))
        return {**self._message(), "content": content, **_end_of(text)}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _format_usage(self.usage()),
        }

    def _event(self, kind: str, **values: Any) -> str:
        return event({"type": kind, "index": self._index, **values}, kind)


def _begin_call(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _end_of(part: Part | None) -> dict[str, Any]:
    if part is None or part.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if part.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": part.stop}
    return {"stop_reason": _STOP_REASONS[part.finish_reason], "stop_sequence": None}


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_tokens,
    }


def _read_messages(fields: Fields, conversation: Conversation) -> None:
    for message in fields.each("messages"):
        role = message.one_of("role", ["user", "assistant", "system"], is_required=True)
        content = message.take("content")
        blocks = content if isinstance(content, list) else [content]
        if not blocks:
            raise message.refusal("content", "a text or at least one block", content)
        for j, block in enumerate(blocks):
            path = f"{message.path}.content[{j}]"
            if role == "assistant":
                _read_answer_block(block, path, conversation)
            elif role == "user" and isinstance(block, dict) and block.get("type") == "tool_result":
                result = Fields(block, path)
                text, call_id = "\n".join(result.texts("content")), result.typed("tool_use_id", str)
                conversation.add_result(call_id or "", text, f"{path}.tool_use_id")
            else:
                conversation.add_text(role, read_text(block, path))
    if not fields.values.get("messages"):
        raise Refusal("messages must be a list of at least one message", "messages")


def _read_answer_block(block: object, path: str, conversation: Conversation) -> None:
    fields = Fields({"text": block, "type": "text"} if isinstance(block, str) else block, path)
    kinds = ("text", "thinking", "redacted_thinking", "tool_use")
    kind = fields.one_of("type", kinds, is_required=True)
    if kind == "text":
        conversation.add_text("assistant", fields.typed("text", str) or "")
    elif kind == "thinking":
        conversation.add_reasoning(fields.typed("thinking", str) or "")
    elif kind == "tool_use":
        arguments = fields.inner("input").values
        conversation.add_call(fields.word("id"), fields.word("name"), arguments)


def _read_thinking(fields: Fields) -> dict[str, Any]:
    """Return the option of chat templates that turns thinking on or off."""
    thinking = fields.inner("thinking")
    kind = thinking.one_of("type", ["enabled", "adaptive", "disabled"])
    return {"enable_thinking": kind != "disabled"} if thinking.values else {}


def _read_output(fields: Fields) -> tuple[str | None, AnswerFormat | None]:
    output = fields.inner("output_config")
    effort, _ = read_effort(output, "effort")
    formats = output.inner("format"), fields.inner("output_format")
    asked = next((one for one in formats if one.values), None)
    output.finish()
    return effort, None if asked is None else read_format(asked)


def _read_tools(fields: Fields) -> Tools:
    tools = Tools(read_tools(fields, ("custom", None), _SERVER_TOOLS, "input_schema"))
    choice = fields.inner("tool_choice")
    kind = choice.one_of("type", ["auto", "any", "tool", "none"]) or "auto"
    names = [choice.word("name")] if kind == "tool" else None
    is_single = choice.typed("disable_parallel_tool_use", bool) or kind == "tool"
    choice.finish()
    word = "required" if kind in ("any", "tool") else kind
    return tools.choose(word, names, is_single)


ROUTES: Routes = {
    ("POST", "/v1/messages"): partial(Service.answer, reader=read),
    ("POST", "/v1/messages/count_tokens"): count,
}

"""OpenAI's ``/v1/chat/completions``."""

from functools import partial
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.fields import Fields
from mlx_redrafter.server.parts import Part, TokenLogprob
from mlx_redrafter.server.protocols.conversation import read_arguments
from mlx_redrafter.server.protocols.openai_fields import choose_tools, read_common
from mlx_redrafter.server.protocols.service import MakeWriter, Routes, Service
from mlx_redrafter.server.protocols.writer import ChoiceWriter, StreamOptions
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest
from mlx_redrafter.server.tools import Tools, read_tool

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Amounts of thinking, in OpenAI's words; "none" turns thinking off in templates that can.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Arguments of `apply_chat_template` that are not options of the template.
_OWN_TEMPLATE_OPTIONS = signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


def read(body: object, defaults: GenerationOptions) -> tuple[ChatRequest, MakeWriter]:
    fields = Fields(body)
    top = read_top_logprobs(fields)
    messages, tools = _read_messages(fields), _read_tools(fields)
    template_options = fields.inner("chat_template_kwargs").values
    for name in template_options.keys() & _OWN_TEMPLATE_OPTIONS:
        raise Refusal(f"chat_template_kwargs must not have {name}", "chat_template_kwargs")
    effort, thinking = read_effort(fields, "reasoning_effort")
    fields.one_of("modalities", [["text"]])
    fields.take("verbosity", "prediction")  # a hint for the style, and drafts of the client
    common, options = read_common(fields, defaults, top)
    request = ChatRequest(
        **common,
        messages=messages,
        tools=tools,
        template_options=thinking | template_options,
        effort=effort,
    )
    return request, partial(ChatWriter, request, options)


def read_top_logprobs(fields: Fields) -> int | None:
    """Read how many of the most probable tokens to show; None shows no log-probabilities."""
    shows = fields.typed("logprobs", bool)
    top = fields.integer("top_logprobs", 0, 20)  # as at OpenAI
    if top and not shows:
        raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if shows else None


def read_effort(fields: Fields, name: str) -> tuple[str | None, dict[str, Any]]:
    """Read the amount of thinking; return its word and the option that turns thinking off."""
    effort = fields.one_of(name, EFFORTS)
    return effort, {"enable_thinking": False} if effort == "none" else {}


class ChatWriter(ChoiceWriter):
    def __init__(self, request: ChatRequest, options: StreamOptions, model: str):
        kind = "chat.completion.chunk" if request.is_streamed else "chat.completion"
        super().__init__("chatcmpl", kind, options, model)
        self._request = request
        # Ids of the tool calls of each text so far.
        self._calls: dict[int, list[str]] = {}

    def is_shown(self, part: Part) -> bool:
        return part.index not in self._calls or super().is_shown(part)

    def choice(self, part: Part, name: str) -> dict[str, Any]:
        message: dict[str, Any] = {"content": part.content}
        if part.index not in self._calls:
            message["role"] = "assistant"
        if name == "message" and part.tool_calls and not part.content:
            message["content"] = None
        if part.reasoning:
            message["reasoning"] = part.reasoning
        known = self._calls.setdefault(part.index, [])
        if part.tool_calls:
            message["tool_calls"] = [_format_call(call, known, name) for call in part.tool_calls]
        logprobs = None
        if self._request.top_logprobs is not None:
            logprobs = {"content": list(map(format_logprobs, part.logprobs))}
        head = {"index": part.index, "finish_reason": part.finish_reason}
        return {**head, name: message, "logprobs": logprobs}


def _format_call(call: ToolCall, known: list[str], name: str) -> dict[str, Any]:
    """Format a whole call, or a piece of one for a ``delta``; add its id to those known."""
    found: dict[str, Any] = {}
    if call.id not in known:
        known.append(call.id)
        found = {"id": call.id, "type": "function", "function": {"name": call.name}}
    if name == "delta":
        found["index"] = known.index(call.id)
    return {**found, "function": {**found.get("function", {}), "arguments": call.arguments}}


def format_logprobs(token: TokenLogprob) -> dict[str, Any]:
    """Format a token with its log-probability, and the most probable ones there."""
    return {**_shown(token), "top_logprobs": list(map(_shown, token.top))}


def _shown(token: TokenLogprob) -> dict[str, Any]:
    raw = None if "\ufffd" in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}


def _read_tools(fields: Fields) -> Tools:
    for tool in fields.each("tools"):
        tool.one_of("type", ["function"], is_required=True)
        read_tool(tool.inner("function"))
    return choose_tools(fields, Tools(fields.values.get("tools") or []))


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Read messages as chat templates expect them: text only, and parsed arguments of calls."""
    messages = list(map(_read_message, fields.each("messages")))
    if not messages:
        raise Refusal("messages must be a list of at least one message", "messages")
    return messages


def _read_message(fields: Fields) -> dict[str, Any]:
    """Check a message, and make its content a text and its thinking a field of templates."""
    role = fields.one_of("role", _ROLES, is_required=True)
    # Templates take a field that is null for one that is given.
    found = {name: one for name, one in fields.values.items() if one is not None}
    found["content"] = "".join(fields.texts("content"))
    for call in fields.each("tool_calls"):
        function = call.typed("function", dict)
        arguments = (function or {}).get("arguments") or "{}"
        if function and isinstance(arguments, str):
            function["arguments"] = read_arguments(arguments)
    if role == "developer":  # OpenAI's newer word, which templates do not know
        found["role"] = "system"
    reasoning = fields.typed("reasoning", str)
    if reasoning is not None:
        found.setdefault("reasoning_content", reasoning)
    return found


ROUTES: Routes = {("POST", "/v1/chat/completions"): partial(Service.answer, reader=read)}

"""OpenAI's ``/v1/responses``: items instead of messages, and answers that clients may continue."""

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.answer_grammar import AnswerFormat
from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.fields import Fields, event, respond
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.conversation import ROLES, Conversation, read_arguments
from mlx_redrafter.server.protocols.openai_chat import read_effort
from mlx_redrafter.server.protocols.openai_fields import (
    IGNORED,
    choose_tools,
    read_format,
    read_options,
)
from mlx_redrafter.server.protocols.service import MakeWriter, Routes, Service
from mlx_redrafter.server.protocols.writer import BlockWriter
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest
from mlx_redrafter.server.stored_responses import StoredResponses
from mlx_redrafter.server.tools import Tools, read_tools

# Fields that do not change the text, next to those of `IGNORED`.
_OTHERS = ("client_metadata", "include", "max_tool_calls", "stream_options", "truncation")
# Types of tools that run at OpenAI or that have no JSON schema. The model is not shown them.
_LEFT_OUT = (
    "apply_patch", "code_interpreter", "custom", "file_search", "image_generation",
    "local_shell", "namespace", "shell", "tool_search", "web_search",
)  # fmt: skip
# Fields of a request that its response repeats, with their defaults.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}

# Type, prefix of the id and fields of an item at its beginning, by the kind of the block.
_ITEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "thinking": ("reasoning", "rs", {"summary": [], "encrypted_content": None}),
    "text": ("message", "msg", {"role": "assistant", "content": []}),
    "call": ("function_call", "fc", {"arguments": ""}),
}
# Places of the only part of an item.
_SUMMARY: dict[str, Any] = {"summary_index": 0}
_CONTENT: dict[str, Any] = {"content_index": 0}
# Names of texts in events, with further fields, by the kind of the block.
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "thinking": ("reasoning_summary_text", _SUMMARY),
    "text": ("output_text", {**_CONTENT, "logprobs": []}),
    "call": ("function_call_arguments", {}),
}
# Names of parts in events, by the kind of the block.
_PARTS = {"thinking": "reasoning_summary_part", "text": "content_part"}


async def answer(service: Service, client: Request) -> Response:
    return await service.answer(client, partial(read, stored=service.stored))


async def fetch(service: Service, client: Request) -> Response:
    response, _ = service.stored.find(client.path_params["id"], "id")
    return respond(response)


async def forget(service: Service, client: Request) -> Response:
    response_id = client.path_params["id"]
    service.stored.forget(response_id, "id")
    return respond({"id": response_id, "object": "response", "deleted": True})


ROUTES: Routes = {
    ("POST", "/v1/responses"): answer,
    ("GET", "/v1/responses/{id}"): fetch,
    ("DELETE", "/v1/responses/{id}"): forget,
}


def read(
    body: object, defaults: GenerationOptions, stored: StoredResponses
) -> tuple[ChatRequest, MakeWriter]:
    fields = Fields(body)
    given = {name: one for name, one in fields.values.items() if one is not None}
    repeated = {name: given.get(name, value) for name, value in _REPEATED.items()}
    repeated["store"] = fields.typed("store", bool) is not False
    fields.take(*IGNORED, *_OTHERS)
    fields.one_of("background", [False])
    before = fields.typed("previous_response_id", str)
    items = [] if before is None else stored.find(before, "previous_response_id")[1]
    items += _read_input(fields)
    effort, thinking = _read_reasoning(fields)
    request = ChatRequest(
        model=fields.typed("model", str),
        options=read_options(fields, defaults, "max_output_tokens"),
        is_streamed=fields.typed("stream", bool) or False,
        format=_read_format(fields),
        messages=_read_items(fields.typed("instructions", str), items),
        tools=choose_tools(fields, Tools(read_tools(fields, ("function",), _LEFT_OUT))),
        template_options=thinking,
        effort=effort,
        param="input",
    )
    fields.one_of("top_logprobs", [0])
    fields.finish()
    return request, partial(ResponseWriter, items, repeated, stored)


class ResponseWriter(BlockWriter):
    """Writes responses of items, which go on a conversation of items; ``stored`` receives both."""

    def __init__(
        self, items: list[Any], repeated: dict[str, Any], stored: StoredResponses, model: str
    ):
        super().__init__(model)
        self._items = items
        self._repeated = repeated
        self._stored = stored
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        # Text of the last item.
        self._text = ""

    def begin(self) -> Iterator[str]:
        if not self._sequence:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress"))

    def open_block(self, call: ToolCall | None) -> Iterator[str]:
        self._text = ""
        kind, prefix, fields = _ITEMS[self.kind]
        head = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        called = {} if call is None else {"call_id": call.id, "name": call.name}
        self._output.append({**head, **called, **fields})
        yield self._event("response.output_item.added", **self._added())
        if call is None:
            yield self._part("added")

    def extend(self, text: str) -> Iterator[str]:
        self._text += text
        name, place = _TEXTS[self.kind]
        yield self._event(f"response.{name}.delta", **self._place, **place, delta=text)

    def close_block(self) -> Iterator[str]:
        item, text = self._output[-1], self._text
        name, place = _TEXTS[self.kind]
        is_call = self.kind == "call"
        is_cut = ToolCall("", "", text).parsed is None if is_call else self._is_cut
        item["status"] = "incomplete" if is_cut else "completed"
        if is_call:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._event(f"response.{name}.done", **self._place, **done)
        else:
            yield self._event(f"response.{name}.done", **self._place, **place, text=text)
            item["summary" if self.kind == "thinking" else "content"] = [_part(self.kind, text)]
            yield self._part("done")
        yield self._event("response.output_item.done", **self._added())

    def finish(self) -> Iterator[str]:
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield from self.begin()
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        response = {**self._response("failed"), "error": error}
        yield self._event("response.failed", response=response)

    def keep_alive(self) -> Iterator[str]:
        yield from self.begin()
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        for _ in (*self.add(texts[0]), *self.close()):
            pass  # the events of a stream make the same items
        return self._finished()

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": list(self._output),
            "usage": None,
            **self._repeated,
        }

    def _finished(self) -> dict[str, Any]:
        """Return the finished response, and store it unless the client has declined that."""
        is_cut, usage = self._is_cut, self.usage()
        response = self._response("incomplete" if is_cut else "completed")
        response["usage"] = {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_tokens,
        }
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._repeated["store"]:
            self._stored.keep(response, [*self._items, *self._output])
        return response

    @property
    def _is_cut(self) -> bool:
        """True if the text has ended at its maximum length, and its last item with it."""
        return self.last is not None and self.last.finish_reason == "length"

    def _event(self, kind: str, **values: Any) -> str:
        text = event({"type": kind, "sequence_number": self._sequence, **values}, kind)
        self._sequence += 1
        return text

    def _part(self, end: str) -> str:
        """Format the event of the only part of the open item."""
        index = _SUMMARY if self.kind == "thinking" else _CONTENT
        part = _part(self.kind, self._text)
        name = f"response.{_PARTS[self.kind]}.{end}"
        return self._event(name, **self._place, **index, part=part)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _added(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1, "item": dict(self._output[-1])}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "summary_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _read_input(fields: Fields) -> list[Any]:
    given = fields.take("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise fields.refusal("input", "a text or a list of items", given)
    return given


def _read_items(instructions: str | None, items: Sequence[object]) -> list[dict[str, Any]]:
    """Make the messages of a chat template from items."""
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions)
    for i, item in enumerate(items):
        fields = Fields(item, f"input[{i}]")
        kind = fields.typed("type", str) or "message"
        if kind == "message":
            role = fields.one_of("role", ROLES, is_required=True)
            for text in fields.texts("content", is_required=True):
                conversation.add_text(role, text)
        elif kind == "reasoning":
            parts = fields.each("content") or fields.each("summary")
            texts = [part.typed("text", str) or "" for part in parts]
            conversation.add_reasoning("\n".join(texts))
        elif kind == "function_call":
            arguments = read_arguments(fields.typed("arguments", str) or "{}")
            conversation.add_call(fields.word("call_id"), fields.word("name"), arguments)
        elif kind == "function_call_output":
            text = "\n".join(fields.texts("output", is_required=True))
            call_id = fields.typed("call_id", str) or ""
            conversation.add_result(call_id, text, f"{fields.path}.call_id")
        else:
            expected = '"message", "reasoning", "function_call" or "function_call_output"'
            raise fields.refusal("type", expected, kind)
    if not (messages := conversation.messages):
        raise Refusal("input must have at least one item", "input")
    return messages


def _read_reasoning(fields: Fields) -> tuple[str | None, dict[str, Any]]:
    reasoning = fields.inner("reasoning")
    reasoning.take("summary", "generate_summary")  # the whole thinking is sent
    effort = read_effort(reasoning, "effort")
    reasoning.finish()
    return effort


def _read_format(fields: Fields) -> AnswerFormat | None:
    text = fields.inner("text")
    text.take("verbosity")
    asked = text.inner("format")
    text.finish()
    return read_format(asked) if asked.values else None

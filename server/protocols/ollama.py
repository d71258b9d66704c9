"""Ollama's ``/api/chat``, ``/api/generate`` and its lists of models."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.answer_grammar import AnswerFormat
from mlx_redrafter.server.call_reader import ToolCall, add_call
from mlx_redrafter.server.fields import Fields
from mlx_redrafter.server.models import LoadedModel, Model
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.conversation import Conversation
from mlx_redrafter.server.protocols.openai_fields import read_options, read_penalties, read_stops
from mlx_redrafter.server.protocols.service import Routes, Service
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest, CompletionRequest
from mlx_redrafter.server.tools import Tools, read_tool
from mlx_redrafter.server.wire import respond, to_text

# Version of Ollama whose API this follows, since clients look for one that is new enough.
OLLAMA_VERSION = "0.13.5"
# Options of Ollama's engine that do not change the text.
_IGNORED_OPTIONS = (
    "draft_num_predict",
    "f16_kv",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
)
# Names of Ollama's options in OpenAI's API and mlx-lm's.
_RENAMED = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
}
# Options of samplers that do not exist here, with the value that turns each off.
_OFF: dict[str, float] = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
# Seconds of the units that ``keep_alive`` may have.
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Prompted = ChatRequest | CompletionRequest


def to_error(refusal: Refusal) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": str(refusal)}


async def chat(service: Service, client: Request) -> Response:
    """Answer ``POST /api/chat``; a request without messages loads the model."""
    request, stay = await service.read(client, read_chat)
    return await _answer(service, client, request, stay, "message")


async def generate(service: Service, client: Request) -> Response:
    """Answer ``POST /api/generate``; a request without a prompt loads the model."""
    request, stay = await service.read(client, read_generate)
    return await _answer(service, client, request, stay, "response")


async def list_models(service: Service, client: Request) -> Response:
    """Answer ``GET /api/tags``."""
    return respond({"models": [_describe(model) for model in service.models]})


async def list_loaded(service: Service, client: Request) -> Response:
    """Answer ``GET /api/ps``."""
    loaded = [model for model in service.models if model.loaded is not None]
    return respond({"models": [_describe(model) for model in loaded]})


async def show(service: Service, client: Request) -> Response:
    """Answer ``POST /api/show``."""
    name = await service.read(client, _read_name)
    model, loaded = await service.models.open(name)
    return respond(_describe_whole(model, loaded))


async def version(service: Service, client: Request) -> Response:
    """Answer ``GET /api/version``."""
    return respond({"version": OLLAMA_VERSION})


ROUTES: Routes = {
    ("POST", "/api/chat"): chat,
    ("POST", "/api/generate"): generate,
    ("GET", "/api/tags"): list_models,
    ("GET", "/api/ps"): list_loaded,
    ("POST", "/api/show"): show,
    ("GET", "/api/version"): version,
}


def read_chat(body: object, defaults: GenerationOptions) -> tuple[Prompted, float | None]:
    """Read a body of ``/api/chat``; return the request and the seconds that its model stays."""
    fields = Fields(body)
    conversation = Conversation()
    for message in fields.each("messages"):
        _read_message(message, conversation)
    tools = Tools([read_tool(tool.inner("function")) for tool in fields.each("tools")])
    return _read_chat(fields, defaults, conversation, tools)


def read_generate(body: object, defaults: GenerationOptions) -> tuple[Prompted, float | None]:
    """Read a body of ``/api/generate``; return the request and the seconds that its model stays."""
    fields = Fields(body)
    prompt, system = fields.typed("prompt", str) or "", fields.typed("system", str)
    for name in ("suffix", "template"):
        fields.one_of(name, [""])
    for name in ("images", "context"):
        fields.one_of(name, [[]])
    if fields.typed("raw", bool):
        common, stay = _read_common(fields, defaults)
        fields.typed("think", bool)
        fields.finish()
        return CompletionRequest(**common, prompts=[prompt] if prompt else []), stay
    conversation = Conversation()
    if system and prompt:
        conversation.add_text("system", system)
    if prompt:
        conversation.add_text("user", prompt)
    return _read_chat(fields, defaults, conversation, Tools([]))


class OllamaWriter(Writer):
    """Writes replies as lines of JSON.

    Args:
        field: Field of a text: "message" in a chat, "response" otherwise.
    """

    media_type = "application/x-ndjson"

    def __init__(self, field: str, model: str):
        super().__init__(model)
        self._field = field
        self._begin = time.perf_counter()
        self._first: float | None = None
        self._finish_reason: str | None = None
        # Calls so far, which Ollama's clients want whole.
        self._calls: list[ToolCall] = []

    def add(self, part: Part) -> Iterator[str]:
        self._first = self._first or time.perf_counter()
        self._finish_reason = part.finish_reason
        for call in part.tool_calls:
            add_call(self._calls, call)
        part = replace(part, tool_calls=self._calls if part.finish_reason else [])
        if part.content or part.reasoning or part.tool_calls:
            yield self._line({**self._say(part), "done": False})

    def end(self) -> Iterator[str]:
        yield self._line({**self._say(None), **self._end()})

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield f"{to_text(to_error(refusal))}\n"

    def keep_alive(self) -> Iterator[str]:
        yield self._line({**self._say(None), "done": False})

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        self._finish_reason = texts[0].finish_reason
        return {**self._head(), **self._say(texts[0]), **self._end()}

    def loaded(self, reason: str) -> dict[str, Any]:
        """Return the reply to a request without a prompt."""
        return {**self._head(), **self._say(None), "done": True, "done_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": datetime.now(UTC).isoformat()}

    def _line(self, value: dict[str, Any]) -> str:
        return f"{to_text({**self._head(), **value})}\n"

    def _say(self, part: Part | None) -> dict[str, Any]:
        content = "" if part is None else part.content
        more: dict[str, Any] = {}
        if part is not None and part.reasoning:
            more["thinking"] = part.reasoning
        if part is not None and part.tool_calls:
            whole = (call for call in part.tool_calls if call.parsed is not None)
            more["tool_calls"] = list(map(_format_call, whole))
        if self._field == "response":
            return {"response": content, **more}
        return {"message": {"role": "assistant", "content": content, **more}}

    def _end(self) -> dict[str, Any]:
        now, usage = time.perf_counter(), self.usage()
        first = self._first or now
        return {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._begin),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": _nanoseconds(first - self._begin),
            "eval_count": usage.num_tokens,
            "eval_duration": _nanoseconds(now - first),
        }


async def _answer(
    service: Service, client: Request, request: Prompted, stay: float | None, field: str
) -> Response:
    model = service.models.find(request.model)
    if stay:
        model.keep_alive = stay
    if request.messages if isinstance(request, ChatRequest) else request.prompts:
        return await service.write(client, request, partial(OllamaWriter, field))
    if stay == 0:
        service.models.unload(model)
    else:
        await service.models.open(request.model)
    reason = "unload" if stay == 0 else "load"
    return respond(OllamaWriter(field, model.name).loaded(reason))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _format_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": call.parsed}}


def _read_chat(
    fields: Fields, defaults: GenerationOptions, conversation: Conversation, tools: Tools
) -> tuple[ChatRequest, float | None]:
    think = fields.take("think")
    if isinstance(think, str) and think not in ("low", "medium", "high"):
        raise fields.refusal("think", 'true, false, "low", "medium" or "high"', think)
    common, stay = _read_common(fields, defaults)
    fields.finish()
    request = ChatRequest(
        **common,
        messages=conversation.messages,
        tools=tools,
        template_options={} if think is None else {"enable_thinking": bool(think)},
        effort=think if isinstance(think, str) else None,
    )
    return request, stay


def _read_common(
    fields: Fields, defaults: GenerationOptions
) -> tuple[dict[str, Any], float | None]:
    """Read the fields of `TextRequest` and the seconds that the model stays in memory."""
    given = fields.inner("options").values.items()
    renamed = {_RENAMED.get(name, name): one for name, one in given if one != _OFF.get(name)}
    options = Fields(renamed, "options")
    options.take(*_IGNORED_OPTIONS)
    fields.take("truncate", "shift")
    stream = fields.typed("stream", bool)
    common = {
        "model": fields.typed("model", str),
        # As at Ollama, a text without a limit ends at the context.
        "options": read_options(options, replace(defaults, max_tokens=-1), "max_tokens"),
        "is_streamed": stream is not False,
        "stops": read_stops(options, "stop"),
        "penalties": read_penalties(options),
        "format": _read_format(fields),
    }
    options.finish()
    return common, _read_stay(fields)


def _read_format(fields: Fields) -> AnswerFormat | None:
    form = fields.take("format")
    if form in (None, ""):
        return None
    if form == "json":
        return AnswerFormat({"type": "object"}, "format")
    if not isinstance(form, dict):
        raise fields.refusal("format", '"json" or a JSON schema', form)
    return AnswerFormat(form, "format")


def _read_stay(fields: Fields) -> float | None:
    """Read ``keep_alive``: a number of seconds or a text such as "5m"; below 0 is for ever."""
    given = fields.take("keep_alive")
    if given is None:
        return None
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?", str(given))
    if match is None or isinstance(given, bool):
        raise fields.refusal("keep_alive", 'a number of seconds, or a text such as "5m"', given)
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    return seconds if seconds >= 0 else math.inf


def _read_name(body: object, defaults: GenerationOptions) -> str | None:
    fields = Fields(body)
    return fields.typed("model", str) or fields.typed("name", str)


def _read_message(fields: Fields, conversation: Conversation) -> None:
    role = fields.one_of("role", ["system", "user", "assistant", "tool"], is_required=True)
    content = fields.typed("content", str) or ""
    fields.one_of("images", [[]])
    if role == "tool":
        name = fields.typed("tool_call_id", str) or fields.typed("tool_name", str)
        conversation.add_result_of(name, content)
        return
    conversation.add_text(role, content)
    if role == "assistant" and (thinking := fields.typed("thinking", str)):
        conversation.add_reasoning(thinking)
    for call in fields.each("tool_calls"):
        function = call.inner("function")
        name = function.typed("name", str) or ""
        call_id = call.typed("id", str) or name
        conversation.add_call(call_id, name, function.inner("arguments").values)


def _describe(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(0, UTC).isoformat(),
        "size": model.estimate_bytes(),
        "digest": "",
        "details": {"format": "safetensors", "family": "", "families": [], "parent_model": ""},
    }


def _describe_whole(model: Model, loaded: LoadedModel) -> dict[str, Any]:
    tokenizer, target = loaded.engine.tokenizer, loaded.engine.target
    kind = str(getattr(target.model, "model_type", "model"))
    capabilities = ["completion"]
    capabilities += ["tools"] if tokenizer.has_tool_calling else []
    capabilities += ["thinking"] if tokenizer.has_thinking else []
    template = tokenizer.chat_template
    return {
        "modelfile": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": {**_describe(model)["details"], "family": kind, "families": [kind]},
        "model_info": {
            "general.architecture": kind,
            f"{kind}.context_length": target.context_length,
            f"{kind}.vocab_size": target.vocab_size,
        },
        "capabilities": capabilities,
    }

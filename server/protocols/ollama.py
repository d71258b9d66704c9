"""Ollama's ``/api/chat``, ``/api/generate`` and its lists of models."""

import hashlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mlx_lm.utils import compute_bits_per_weight, get_total_parameters
from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.answer_grammar import AnswerFormat
from mlx_redrafter.server.call_reader import ToolCall, add_call
from mlx_redrafter.server.fields import Fields, respond, to_text
from mlx_redrafter.server.models import LoadedModel, Model
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.conversation import Conversation
from mlx_redrafter.server.protocols.openai_chat import format_logprobs, read_top_logprobs
from mlx_redrafter.server.protocols.openai_fields import (
    MAX_PENALTY_CONTEXT,
    read_options,
    read_penalties,
    read_stops,
)
from mlx_redrafter.server.protocols.service import Reader, Routes, Service
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest, CompletionRequest
from mlx_redrafter.server.tools import Tools, read_tool

# Options that do not change the text, and samplers that Ollama's own engine has no more.
_IGNORED_OPTIONS = (
    "draft_num_predict", "f16_kv", "low_vram", "main_gpu", "mirostat", "mirostat_eta",
    "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa",
    "penalize_newline", "tfs_z", "typical_p", "use_mlock", "use_mmap", "vocab_only",
)  # fmt: skip
# Names of Ollama's options in OpenAI's API and mlx-lm's.
_RENAMED = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
}
# Seconds of the units that ``keep_alive`` may have.
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Prompted = ChatRequest | CompletionRequest


def to_error(refusal: Refusal) -> dict[str, Any]:
    return {"error": str(refusal)}


async def answer(
    service: Service, client: Request, read: Reader[tuple[Prompted, float | None]], field: str
) -> Response:
    """Answer a request for a text; one without a prompt loads the model, or unloads it."""
    request, stay = await service.read(client, read)
    model = service.models.find(request.model)
    prompts = request.messages if isinstance(request, ChatRequest) else request.prompts
    if stay is not None:  # 0 unloads the model after its texts
        model.keep_alive = stay
    if prompts:
        return await service.write(client, request, partial(OllamaWriter, field))
    if stay != 0:
        await service.models.open(request.model)
    elif model.loaded is None or not service.models.is_used(model.loaded):
        service.models.unload(model)
    reason = "unload" if stay == 0 else "load"
    return respond(OllamaWriter(field, model.name).loaded(reason))


async def list_models(service: Service, client: Request) -> Response:
    return respond({"models": [_describe(model) for model in service.models]})


async def list_loaded(service: Service, client: Request) -> Response:
    shown = [_describe_loaded(one, found) for one in service.models if (found := one.loaded)]
    return respond({"models": shown})


async def show(service: Service, client: Request) -> Response:
    name = await service.read(client, _read_name)
    model, loaded = await service.models.open(name)
    return respond(_describe_whole(model, loaded))


async def version(service: Service, client: Request) -> Response:
    # The version whose API this follows: clients look for one that is new enough.
    return respond({"version": "0.13.5"})


def read_chat(body: object, defaults: GenerationOptions) -> tuple[Prompted, float | None]:
    """Read a body of ``/api/chat``; return the request and the seconds that its model stays."""
    fields = Fields(body)
    conversation = Conversation()
    for message in fields.each("messages"):
        _read_message(message, conversation)
    tools = Tools([read_tool(tool.inner("function")) for tool in fields.each("tools")])
    return _read_chat(fields, defaults, conversation, tools, "messages")


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
    return _read_chat(fields, defaults, conversation, Tools([]), "prompt")


class OllamaWriter(Writer):
    """Writes replies as lines of JSON; a text's field is "message" in chats, else "response"."""

    media_type = "application/x-ndjson"

    def __init__(self, field: str, model: str):
        super().__init__(model)
        self._field = field
        self._finish_reason: str | None = None
        # Calls so far, which Ollama's clients want whole.
        self._calls: list[ToolCall] = []

    def add(self, part: Part) -> Iterator[str]:
        self._finish_reason = part.finish_reason
        for call in part.tool_calls:
            add_call(self._calls, call)
        part = replace(part, tool_calls=self._calls if part.finish_reason else [])
        if part.has_content:
            yield _line({**self._say(part), "done": False})

    def end(self) -> Iterator[str]:
        yield _line({**self._say(), **self._end()})

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield _line(to_error(refusal))

    def keep_alive(self) -> Iterator[str]:
        yield _line({**self._say(), "done": False})

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        self._finish_reason = texts[0].finish_reason
        return {**self._say(texts[0]), **self._end()}

    def loaded(self, reason: str) -> dict[str, Any]:
        return {**self._say(), "done": True, "done_reason": reason}

    def _say(self, part: Part | None = None) -> dict[str, Any]:
        content, said, shown = "", dict[str, Any](), dict[str, Any]()
        if part is not None:
            content = part.content
            if part.reasoning:
                said["thinking"] = part.reasoning
            if part.tool_calls:
                said["tool_calls"] = [
                    {"id": call.id, "function": {"name": call.name, "arguments": call.parsed}}
                    for call in part.tool_calls
                    if call.parsed is not None
                ]
            if part.logprobs:
                shown = {"logprobs": list(map(format_logprobs, part.logprobs))}
        head = {"model": self.model, "created_at": datetime.now(UTC).isoformat()}
        if self._field == "response":
            return {**head, "response": content, **said, **shown}
        return {**head, "message": {"role": "assistant", "content": content, **said}, **shown}

    def _end(self) -> dict[str, Any]:
        usage = self.usage()
        seconds = usage.load_seconds, usage.prompt_seconds, usage.text_seconds
        load, prompt, text = (max(1, int(one * 1e9)) for one in seconds)  # clients divide by them
        return {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": load + prompt + text,
            "load_duration": load,
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": prompt,
            "eval_count": usage.num_tokens,
            "eval_duration": text,
        }


def _line(value: dict[str, Any]) -> str:
    return f"{to_text(value)}\n"


def _read_chat(
    fields: Fields, defaults: GenerationOptions, talk: Conversation, tools: Tools, param: str
) -> tuple[ChatRequest, float | None]:
    think = fields.take("think")
    if isinstance(think, str) and think not in ("low", "medium", "high"):
        raise fields.refusal("think", 'true, false, "low", "medium" or "high"', think)
    common, stay = _read_common(fields, defaults)
    fields.finish()
    request = ChatRequest(
        **common,
        messages=talk.messages,
        tools=tools,
        template_options={} if think is None else {"enable_thinking": bool(think)},
        effort=think if isinstance(think, str) else None,
        param=param,
    )
    return request, stay


def _read_common(
    fields: Fields, defaults: GenerationOptions
) -> tuple[dict[str, Any], float | None]:
    """Read the fields of `TextRequest` and the seconds that the model stays in memory."""
    options = _read_options(fields)
    fields.take("truncate", "shift")
    common = {
        "model": fields.typed("model", str),
        "options": read_options(options, defaults, "max_tokens"),
        "is_streamed": fields.typed("stream", bool) is not False,
        "stops": read_stops(options, "stop"),
        "penalties": read_penalties(options),
        "format": _read_format(fields),
        "top_logprobs": read_top_logprobs(fields),
    }
    options.finish()
    return common, _read_stay(fields)


def _read_options(fields: Fields) -> Fields:
    """Return the options by their names in OpenAI's API and mlx-lm's, but those that are ignored.

    As at Ollama, a length of 0 or less is no limit, a seed below 0 is a new one, and penalties look
    back at no token, or at all of them.
    """
    given = dict(fields.inner("options").values)
    length, seed, size = map(given.get, ("num_predict", "seed", "repeat_last_n"))
    if type(length) is int and length <= 0:
        given["num_predict"] = -1
    if type(seed) is int and seed < 0:
        del given["seed"]
    if size in (0, -1):
        given["repeat_last_n"] = MAX_PENALTY_CONTEXT
        given["repeat_penalty"] = given.get("repeat_penalty") if size else None
    for name in _IGNORED_OPTIONS:
        given.pop(name, None)
    renamed = {_RENAMED.get(name, name): value for name, value in given.items()}
    return Fields(renamed, "options", {new: old for old, new in _RENAMED.items()})


def _read_format(fields: Fields) -> AnswerFormat | None:
    form = fields.take("format")
    if form in (None, ""):
        return None
    schema = {"type": "object"} if form == "json" else form
    if not isinstance(schema, dict):
        raise fields.refusal("format", '"json" or a JSON schema', form)
    return AnswerFormat(schema, "format")


def _read_stay(fields: Fields) -> float | None:
    """Read ``keep_alive``: a number of seconds or a text such as "1h5m"; below 0 is for ever."""
    given = fields.take("keep_alive")
    if given is None:
        return None
    number = r"(\d+(?:\.\d+)?)"
    whole = rf"-?(?:{number}|(?:{number}(?:ms|s|m|h))+)"
    if isinstance(given, bool) or re.fullmatch(whole, str(given)) is None:
        raise fields.refusal("keep_alive", 'a number of seconds, or a text such as "1h5m"', given)
    parts = re.findall(rf"{number}(ms|s|m|h)?", str(given))
    seconds = sum(float(amount) * _SECONDS[unit or "s"] for amount, unit in parts)
    return math.inf if str(given).startswith("-") else seconds


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
        "modified_at": _format_time(model.modified),
        "size": model.estimate_bytes(),
        # Clients show its beginning. Nothing can be fetched by it.
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _describe_details(model.loaded),
    }


def _describe_details(loaded: LoadedModel | None) -> dict[str, Any]:
    """Return the kind and the size of a model, which are known once it is loaded."""
    kinds: list[str] = []
    size = level = ""
    if loaded is not None:
        network = loaded.engine.target.model
        kinds = [_kind(loaded)]
        count, bits = get_total_parameters(network), round(compute_bits_per_weight(network))
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
        level = f"F{bits}" if bits >= 16 else f"Q{bits}"
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "".join(kinds),
        "families": kinds,
        "parameter_size": size,
        "quantization_level": level,
    }


def _describe_loaded(model: Model, loaded: LoadedModel) -> dict[str, Any]:
    stays = model.last_used + model.keep_alive - time.monotonic()
    end = min(time.time() + stays, datetime(9999, 1, 1, tzinfo=UTC).timestamp())
    more = {"expires_at": _format_time(end), "context_length": loaded.context}
    return {**_describe(model), **more, "size_vram": loaded.nbytes}


def _kind(loaded: LoadedModel) -> str:
    return str(getattr(loaded.engine.target.model, "model_type", "model"))


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe_whole(model: Model, loaded: LoadedModel) -> dict[str, Any]:
    tokenizer, kind = loaded.engine.tokenizer, _kind(loaded)
    capabilities = ["completion"]
    capabilities += ["tools"] if tokenizer.has_tool_calling else []
    capabilities += ["thinking"] if tokenizer.has_thinking else []
    template = tokenizer.chat_template
    return {
        "modelfile": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "modified_at": _format_time(model.modified),
        "details": _describe_details(loaded),
        "model_info": {
            "general.architecture": kind,
            "general.basename": model.name,
            "general.parameter_count": get_total_parameters(loaded.engine.target.model),
            f"{kind}.context_length": loaded.context,
            f"{kind}.vocab_size": loaded.engine.target.vocab_size,
        },
        "capabilities": capabilities,
    }


ROUTES: Routes = {
    ("POST", "/api/chat"): partial(answer, read=read_chat, field="message"),
    ("POST", "/api/generate"): partial(answer, read=read_generate, field="response"),
    ("GET", "/api/tags"): list_models,
    ("GET", "/api/ps"): list_loaded,
    ("POST", "/api/show"): show,
    ("GET", "/api/version"): version,
}

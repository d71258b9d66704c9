"""Requests in OpenAI's format, checked field by field and then against the model."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.server import process_message_content

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.prompt_encoding import (
    LongPromptError,
    check_prompt,
    encode_chat,
    encode_prompt,
)
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SAMPLING_NAMES, GenerationOptions
from mlx_redrafter.grammar import Grammar
from mlx_redrafter.server.fields import Fields, shortened
from mlx_redrafter.server.refusals import ContextExceeded, Refusal

# Maximum number of texts of one request: n times the number of prompts.
MAX_TEXTS = 16
# Maximum number of stop strings.
MAX_STOPS = 16
# Maximum length of a stop string, in characters.
MAX_STOP_LENGTH = 256
# Maximum number of tools.
MAX_TOOLS = 128
# Maximum number of tokens in ``logit_bias``.
MAX_BIASES = 1024
# Maximum of ``top_logprobs`` in a chat, as at OpenAI.
MAX_TOP_LOGPROBS = 20
# Maximum of ``logprobs`` in completions, as at OpenAI.
MAX_COMPLETION_LOGPROBS = 5
# Number of tokens that a penalty looks back at by default, as in mlx-lm.
PENALTY_CONTEXT = 20
# Maximum number of tokens that a penalty looks back at.
MAX_PENALTY_CONTEXT = 2**20

# Sampling options and their names in OpenAI's API.
_OPTIONS = {**{name: name for name in SAMPLING_NAMES}, "temp": "temperature"}
# Fields without effect: they tell OpenAI who sends a request.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Arguments of `apply_chat_template` that are not options of the template, and a template itself.
_OWN_TEMPLATE_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True)
class TextRequest:
    """A request for one or several texts.

    Attributes:
        model: Name of the model; None for the server's.
        options: Options of the texts, with the seed of the first one.
        num_texts: Number of texts for every prompt; each has the seed of the previous one plus 1.
        stops: Strings that end a text and are not part of it.
        penalties: Arguments of mlx-lm's ``make_logits_processors``.
        grammar: Grammar of the texts; None for none.
        top_logprobs: Number of most probable tokens shown with each token; None shows no
            log-probabilities.
        is_streamed: Whether to send parts as soon as they are generated.
        shows_usage: Whether the last part of a stream is the usage.
        shows_drafts: Whether the parts of a stream tell drafted tokens from others.
    """

    model: str | None
    options: GenerationOptions
    num_texts: int
    stops: tuple[str, ...]
    penalties: dict[str, Any]
    grammar: Grammar | None
    top_logprobs: int | None
    is_streamed: bool
    shows_usage: bool
    shows_drafts: bool


@dataclass(frozen=True)
class ChatRequest(TextRequest):
    """A request for answers in a chat.

    Attributes:
        messages: Messages in the form that chat templates expect.
        tools: Tools that the model may call.
        template_options: Further options of the chat template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_options: dict[str, Any]


@dataclass(frozen=True)
class CompletionRequest(TextRequest):
    """A request for continuations.

    Attributes:
        prompts: Texts or token ids.
    """

    prompts: list[str | list[int]]


def parse_chat(body: object, defaults: GenerationOptions) -> ChatRequest:
    """Parse the body of ``/v1/chat/completions``.

    Raises:
        Refusal: A field has a wrong value, or is not supported.
    """
    fields = Fields(body)
    shows = fields.typed("logprobs", bool)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not shows:
        raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
    messages = _read_messages(fields)
    tools = _read_tools(fields)
    template_options = fields.typed("chat_template_kwargs", dict) or {}
    for name in template_options.keys() & _OWN_TEMPLATE_OPTIONS:
        raise Refusal(f"chat_template_kwargs must not have {name}", "chat_template_kwargs")
    fields.one_of("modalities", [["text"]])
    fields.one_of("parallel_tool_calls", [True])
    common = _read_common(fields, defaults, (top or 0) if shows else None)
    if tools and common["grammar"] is not None:
        raise Refusal("response_format cannot be combined with tools", "response_format")
    return ChatRequest(**common, messages=messages, tools=tools, template_options=template_options)


def parse_completion(body: object, defaults: GenerationOptions) -> CompletionRequest:
    """Parse the body of ``/v1/completions``.

    Raises:
        Refusal: A field has a wrong value, or is not supported.
    """
    fields = Fields(body)
    top = fields.integer("logprobs", 0, MAX_COMPLETION_LOGPROBS)
    fields.one_of("echo", [False])
    fields.one_of("suffix", [""])
    fields.one_of("best_of", [1])
    prompt = fields.take("prompt")
    prompts = prompt if _is_several(prompt) else [prompt]
    if not all(map(_is_prompt, prompts)) or len(prompts) > MAX_TEXTS:
        expected = f"a text, a list of token ids, or a list of at most {MAX_TEXTS} of them"
        raise fields.refusal("prompt", expected, prompt)
    common = _read_common(fields, defaults, top)
    if len(prompts) * common["num_texts"] > MAX_TEXTS:
        raise Refusal(f"n times the prompts must be at most {MAX_TEXTS}", "n")
    return CompletionRequest(**common, prompts=prompts)


def fit(
    request: TextRequest, engine: Engine, max_context: int
) -> tuple[TextRequest, list[list[int]]]:
    """Check a request against the model, and end its texts where the context ends.

    Args:
        request: The request.
        engine: Engine of the model.
        max_context: Maximum number of tokens of a prompt and its text.

    Returns:
        The request with ``max_tokens`` and ``top_k`` within the model's sizes, and the token ids of
        its prompts.

    Raises:
        Refusal: The model has no chat template, tools or grammars, or not enough context.
    """
    target = engine.target
    context = min(max_context, target.context_length or max_context)
    prompts, param = _encode(request, engine, context)
    longest = max(map(len, prompts))
    if longest >= context:
        raise ContextExceeded(param, longest, context)
    try:
        for prompt in prompts:
            check_prompt(prompt, 0, target)
    except ConfigError as error:
        raise Refusal(str(error), param) from error
    biased = max(request.penalties.get("logit_bias") or [0])
    if biased >= target.vocab_size:
        raise Refusal(
            f"logit_bias must have token ids below {target.vocab_size}, got {biased}", "logit_bias"
        )
    if request.grammar is not None:
        try:
            engine.masks(request.grammar)
        except ConfigError as error:
            raise Refusal(f"response_format: {error}", "response_format") from error
    options, left = request.options, context - longest
    changed: dict[str, Any] = {"top_k": 0} if (options.top_k or 0) >= target.vocab_size else {}
    if not 0 < options.max_tokens <= left:
        changed["max_tokens"] = left
    return replace(request, options=replace(options, **changed)), prompts


def _encode(request: TextRequest, engine: Engine, context: int) -> tuple[list[list[int]], str]:
    """Encode the prompts; return their token ids and the name of their field."""
    tokenizer = engine.tokenizer
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    try:
        if isinstance(request, CompletionRequest):
            return [encode_prompt(tokenizer, one, context) for one in request.prompts], param
        assert isinstance(request, ChatRequest)
        if not tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template; use /v1/completions")
        if request.tools and not tokenizer.has_tool_calling:
            raise Refusal(
                "the chat template of the model has no tool calls; leave the tools out", "tools"
            )
        tools = {"tools": request.tools} if request.tools else {}
        options = request.template_options | tools
        return [encode_chat(tokenizer, request.messages, options, limit=context)], param
    except LongPromptError as error:
        raise ContextExceeded(param, error.num_tokens, context, is_counted=False) from error
    except ConfigError as error:
        raise Refusal(str(error), param) from error


def _is_several(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token) is int for token in prompt)
    return isinstance(prompt, str)


def _read_common(
    fields: Fields, defaults: GenerationOptions, top_logprobs: int | None
) -> dict[str, Any]:
    """Read the fields of `TextRequest`, and check that no other field is left."""
    for name in _IGNORED:
        fields.take(name)
    fields.one_of("store", [False])
    fields.one_of("service_tier", ["auto", "default"])
    streams = fields.typed("stream", bool) or False
    shown = fields.take("stream_options")
    if shown is not None and not streams:
        raise Refusal("stream_options needs stream to be true", "stream_options")
    stream_options = Fields({} if shown is None else shown, "stream_options")
    common = {
        "model": fields.typed("model", str),
        "options": _read_options(fields, defaults),
        "num_texts": fields.integer("n", 1, MAX_TEXTS) or 1,
        "stops": _read_stops(fields),
        "penalties": _read_penalties(fields),
        "grammar": _read_grammar(fields),
        "top_logprobs": top_logprobs,
        "is_streamed": streams,
        "shows_usage": stream_options.typed("include_usage", bool) or False,
        "shows_drafts": stream_options.typed("include_drafts", bool) or False,
    }
    stream_options.finish()
    fields.finish()
    return common


def _read_options(fields: Fields, defaults: GenerationOptions) -> GenerationOptions:
    """Read the options of a text; options that are left out have the server's values."""
    given = {option: fields.take(name) for option, name in _OPTIONS.items()}
    old, new = fields.take("max_tokens"), fields.take("max_completion_tokens")
    given["max_tokens"] = old if new is None else new
    try:
        return replace(defaults, **{name: one for name, one in given.items() if one is not None})
    except ConfigError as error:
        option, _, rest = str(error).partition(" ")
        name = _OPTIONS.get(option, option)
        raise Refusal(f"{name} {shortened(rest)}", name) from error


def _read_stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    stops = given if isinstance(given, list) else [] if given is None else [given]
    if len(stops) > MAX_STOPS or not all(
        isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in stops
    ):
        expected = f"a text of 1 to {MAX_STOP_LENGTH} characters, or at most {MAX_STOPS} of them"
        raise fields.refusal("stop", expected, given)
    return tuple(stops)


def _read_grammar(fields: Fields) -> Grammar | None:
    """Read the grammar of the response format; ``strict`` makes no difference to it."""
    given = fields.typed("response_format", dict)
    if given is None:
        return None
    asked = Fields(given, "response_format")
    kind = asked.one_of("type", ["text", "json_object", "json_schema"])
    if kind is None:
        raise asked.refusal("type", '"text", "json_object" or "json_schema"', None)
    schema = _read_schema(asked) if kind == "json_schema" else None
    asked.finish()
    if kind == "text":
        return None
    try:
        return Grammar.json_object() if schema is None else Grammar.json_schema(schema)
    except ConfigError as error:
        raise Refusal(f"response_format: {error}", "response_format") from error


def _read_schema(asked: Fields) -> dict[str, Any]:
    within = Fields(asked.typed("json_schema", dict) or {}, "response_format.json_schema")
    for name in ("name", "description"):
        within.typed(name, str)
    within.typed("strict", bool)
    schema: dict[str, Any] | None = within.typed("schema", dict)
    within.finish()
    if schema is None:
        raise within.refusal("schema", "an object", None)
    return schema


def _read_penalties(fields: Fields) -> dict[str, Any]:
    given: dict[str, Any] = {
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10),
        "logit_bias": _read_biases(fields),
    }
    for kind in ("presence", "frequency", "repetition"):
        name = f"{kind}_context_size"
        size = fields.integer(name, 1, MAX_PENALTY_CONTEXT)
        given[name] = PENALTY_CONTEXT if size is None else size
    is_on = any(given[name] for name in given if not name.endswith("_size"))
    return given if is_on else {}


def _read_biases(fields: Fields) -> dict[int, float]:
    given = fields.typed("logit_bias", dict) or {}
    if len(given) > MAX_BIASES:
        raise Refusal(f"logit_bias must have at most {MAX_BIASES} tokens", "logit_bias")
    biases = Fields(given, "logit_bias")
    found = {}
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise Refusal(
                f"logit_bias must have token ids as names, got {reprlib.repr(name)}", "logit_bias"
            )
        found[int(name)] = biases.number(name, -100, 100) or 0.0
    return found


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.typed("tools", list) or []
    if len(tools) > MAX_TOOLS:
        raise Refusal(f"tools must be at most {MAX_TOOLS}, got {len(tools)}", "tools")
    for i, tool in enumerate(tools):
        one = Fields(tool, f"tools[{i}]")
        if one.one_of("type", ["function"]) is None:
            raise one.refusal("type", '"function"', None)
        function = Fields(one.take("function"), f"tools[{i}].function")
        if not function.typed("name", str):
            raise function.refusal("name", "a text that is not empty", None)
    hint = ", since the server does not enforce calls"
    return [] if fields.one_of("tool_choice", ["auto", "none"], hint) == "none" else tools


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Read messages as chat templates expect them: text only, and parsed arguments of calls."""
    given = fields.typed("messages", list)
    if not given:
        raise Refusal("messages must be a list of at least one message", "messages")
    for i, message in enumerate(given):
        _check_message(Fields(message, f"messages[{i}]"))
    try:
        process_message_content(given)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"messages must have JSON as the arguments of tool calls: {error}", "messages"
        ) from error
    return given


def _check_message(message: Fields) -> None:
    if message.one_of("role", _ROLES) is None:
        raise message.refusal("role", " or ".join(_ROLES), None)
    content = message.take("content")
    for part in content if isinstance(content, list) else []:
        text = Fields(part, "content")
        if text.take("type") != "text" or text.typed("text", str) is None:
            raise message.refusal("content", "text only; images and files are not supported", part)
    if not isinstance(content, (str, list, type(None))):
        raise message.refusal("content", "a text or a list of texts", content)
    for i, call in enumerate(message.typed("tool_calls", list) or []):
        Fields(call, f"tool_calls[{i}]").typed("function", dict)

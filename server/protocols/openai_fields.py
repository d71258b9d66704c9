"""Fields that both of OpenAI's older endpoints read, and the sampling options of all protocols."""

import reprlib
from dataclasses import replace
from typing import Any

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SAMPLING_NAMES, GenerationOptions
from mlx_redrafter.server.answer_grammar import AnswerFormat
from mlx_redrafter.server.fields import Fields, shortened
from mlx_redrafter.server.protocols.writer import StreamOptions
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import MAX_TEXTS
from mlx_redrafter.server.tools import Tools

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BIASES = 1024
# Minimum factor of a penalty: the logits overflow if they are divided by much smaller ones.
MIN_REPETITION_PENALTY = 0.01
# Maximum number of tokens that a penalty looks back at.
MAX_PENALTY_CONTEXT = 2**20

OPTIONS = {**{name: name for name in SAMPLING_NAMES}, "temp": "temperature"}
# Fields that do not change the text: OpenAI bills, caches and attributes requests by them.
IGNORED = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
)  # fmt: skip


def read_common(
    fields: Fields, defaults: GenerationOptions, top_logprobs: int | None
) -> tuple[dict[str, Any], StreamOptions]:
    """Read the fields of `TextRequest`, and check that no other field is left."""
    fields.take(*IGNORED)
    streams = fields.typed("stream", bool) or False
    shown = fields.inner("stream_options")
    if not streams and fields.values.get("stream_options") is not None:
        raise Refusal("stream_options needs stream to be true", "stream_options")
    shown.take("include_obfuscation")
    has_format = fields.values.get("response_format") is not None
    form = fields.inner("response_format")
    common = {
        "model": fields.typed("model", str),
        "options": read_options(fields, defaults, "max_tokens", "max_completion_tokens"),
        "num_texts": fields.integer("n", 1, MAX_TEXTS) or 1,
        "stops": read_stops(fields, "stop"),
        "penalties": read_penalties(fields),
        "format": read_format(form, "json_schema") if has_format else None,
        "top_logprobs": top_logprobs,
        "is_streamed": streams,
    }
    options = StreamOptions(
        shown.typed("include_usage", bool) or False, shown.typed("include_drafts", bool) or False
    )
    shown.finish()
    fields.finish()
    return common, options


def read_options(
    fields: Fields, defaults: GenerationOptions, *length_names: str
) -> GenerationOptions:
    """Read the options of a text; options that are left out have the server's values.

    Of the fields for ``max_tokens`` that are given, the last one counts.
    """
    given = {option: fields.take(name) for option, name in OPTIONS.items()}
    given["max_tokens"] = fields.take(*length_names)
    try:
        return replace(defaults, **{name: one for name, one in given.items() if one is not None})
    except ConfigError as error:
        option, _, rest = str(error).partition(" ")
        name = length_names[0] if option == "max_tokens" else OPTIONS.get(option, option)
        path = fields.path_of(name)
        raise Refusal(f"{path} {shortened(rest)}", path) from error


def format_options(options: GenerationOptions) -> dict[str, Any]:
    """Return the options of texts that have a value, by their names in requests."""
    found = {name: getattr(options, option) for option, name in OPTIONS.items()}
    found["max_tokens"] = options.max_tokens if options.max_tokens > 0 else None
    return {name: value for name, value in found.items() if value is not None}


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    given = fields.take(name)
    stops = given if isinstance(given, list) else [] if given is None else [given]
    if len(stops) > MAX_STOPS or not all(
        isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in stops
    ):
        expected = f"a text of 1 to {MAX_STOP_LENGTH} characters, or at most {MAX_STOPS} of them"
        raise fields.refusal(name, expected, given)
    return tuple(stops)


def read_penalties(fields: Fields) -> dict[str, Any]:
    """Read the arguments of mlx-lm's ``make_logits_processors``; none if no penalty is given."""
    factor = fields.number("repetition_penalty", 0, 10)
    if factor and factor < MIN_REPETITION_PENALTY:
        expected = f"0 for none, or at least {MIN_REPETITION_PENALTY}"
        raise fields.refusal("repetition_penalty", expected, factor)
    given: dict[str, Any] = {
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": factor,
        "logit_bias": _read_biases(fields),
    }
    for kind in ("presence", "frequency", "repetition"):
        name = f"{kind}_context_size"
        size = fields.integer(name, 1, MAX_PENALTY_CONTEXT)
        given[name] = 20 if size is None else size  # as in mlx-lm
    is_on = any(given[name] for name in given if not name.endswith("_size"))
    return given if is_on else {}


def read_format(asked: Fields, inner: str = "") -> AnswerFormat | None:
    """Read the format of an answer; ``strict`` makes no difference to a schema.

    ``inner`` is the field of the object with the schema, if that is in an object of its own.
    """
    kind = asked.one_of("type", ["text", "json_object", "json_schema"], is_required=True)
    schema: dict[str, Any] = {"type": "object"}
    if kind == "json_schema":
        given = asked.inner(inner) if inner else asked
        given.take("name", "description", "strict")
        if "schema" not in given.values:
            raise given.refusal("schema", "an object", None)
        schema = given.inner("schema").values
        given.finish()
    asked.finish()
    return None if kind == "text" else AnswerFormat(schema, asked.path)


def choose_tools(fields: Fields, tools: Tools) -> Tools:
    """Read ``tool_choice``, a word, a function or allowed tools, and ``parallel_tool_calls``.

    Chats have the name of a function, and the allowed tools, in an object of their own.
    """
    names, choice = None, fields.take("tool_choice")
    is_single = fields.typed("parallel_tool_calls", bool) is False
    if isinstance(choice, dict):
        asked = Fields(choice, "tool_choice")
        if asked.one_of("type", ["function", "allowed_tools"]) == "allowed_tools":
            allowed = asked.inner("allowed_tools") if "allowed_tools" in choice else asked
            choice = allowed.one_of("mode", ["auto", "required"])
            names = list(map(_name_of, allowed.each("tools")))
        else:
            choice, names, is_single = "required", [_name_of(asked)], True
    elif choice not in (None, "auto", "none", "required"):
        raise fields.refusal("tool_choice", '"auto", "none", "required" or a tool', choice)
    return tools.choose(choice or "auto", names, is_single)


def _name_of(tool: Fields) -> str:
    return (tool.inner("function") if "function" in tool.values else tool).word("name")


def _read_biases(fields: Fields) -> dict[int, float]:
    biases, found = fields.inner("logit_bias"), {}
    if len(biases.values) > MAX_BIASES:
        raise Refusal(f"logit_bias must have at most {MAX_BIASES} tokens", "logit_bias")
    for name in biases.values:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise Refusal(
                f"logit_bias must have token ids as names, got {reprlib.repr(name)}", "logit_bias"
            )
        found[int(name)] = biases.number(name, -100, 100) or 0.0
    return found

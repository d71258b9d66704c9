"""The formats of tool calls that mlx-lm's parsers read.

In the texts of a format, ``$name`` is the name of the tool, and ``$number`` a number that the model
chooses. ``$key`` is the name of an argument, and ``$type`` its JSON type.
"""

import re
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.grammar import NOTES

# Characters of a string that templates write in a CDATA section.
_NEEDS_CDATA = re.compile(r"[<&\n]")


@dataclass(frozen=True)
class CallFormat:
    """A format of calls: the arguments are a JSON object, unless it has ``quote`` or ``before``.

    Attributes:
        head: Text before the arguments.
        tail: Text after the arguments.
        again: Text between the calls that stand between one pair of markers; None if one does.
        around: Texts before the first of these calls and after the last one.
        call_id: Id of a call; empty if the format has none.
        quote: Text on either side of a string, in an object with bare keys.
        before: Text before the value of an argument, if these stand one after the other.
        after: Text after the value. If it is not empty, strings stand there without quotes.
        between: Text between two arguments.
        has_cdata: Whether a string with ``<``, ``&`` or a line break stands in a CDATA section.
    """

    head: str
    tail: str = ""
    again: str | None = None
    around: tuple[str, str] = ("", "")
    call_id: str = ""
    quote: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    has_cdata: bool = False

    def is_bare(self, schema: Any) -> bool:
        """Return whether an argument is a string that stands between tags as it is."""
        if not self.after or not isinstance(schema, dict):
            return False
        words = schema.keys() - NOTES
        if words in ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"}):
            reserved = _NEEDS_CDATA if self.has_cdata else re.compile(re.escape(self.after))
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            return all(isinstance(one, str) and not reserved.search(one) for one in choices)
        return schema.get("type") == "string" and words <= {"type", "minLength", "maxLength"}


_JSON = CallFormat('{"name": "$name", "arguments": ', "}")
_GLM = CallFormat("$name\n", before="<arg_key>$key</arg_key>\n<arg_value>", after="</arg_value>\n")
# Formats by the module of mlx-lm's parser.
_FORMATS = {
    "function_gemma": CallFormat("call:$name", quote="<escape>"),
    "gemma4": CallFormat("call:$name", quote='<|"|>'),
    "glm47": _GLM,
    "json_tools": _JSON,
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        again="",
        call_id="functions.$name:$number",
    ),
    "kimi_k3": CallFormat(
        '<|open|>call tool="$name" index="$number"<|sep|>',
        "<|close|>call<|sep|>",
        again="",
        before='<|open|>argument key="$key" type="$type"<|sep|>',
        after="<|close|>argument<|sep|>",
    ),
    "laguna": _GLM,
    "longcat": CallFormat(
        "$name\n",
        before="<longcat_arg_key>$key</longcat_arg_key>\n<longcat_arg_value>",
        after="</longcat_arg_value>\n",
    ),
    "minicpm5": CallFormat(
        '"$name">', before='<param name="$key">', after="</param>", has_cdata=True
    ),
    "minimax_m2": CallFormat(
        '<invoke name="$name">\n',
        "</invoke>",
        before='<parameter name="$key">',
        after="</parameter>\n",
    ),
    "mistral": CallFormat("$name[ARGS]", again="[TOOL_CALLS]"),
    "pythonic": CallFormat(
        "$name(", ")", again=", ", around=("[", "]"), before="$key=", between=", "
    ),
    "qwen3_coder": CallFormat(
        "<function=$name>\n", "</function>", before="<parameter=$key>\n", after="\n</parameter>\n"
    ),
}


def find_format(tokenizer: TokenizerWrapper) -> CallFormat | None:
    """Return the format of a model's calls; None if there is no grammar for it."""
    name = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if tokenizer.response_transitions:  # states of its own decide where a call begins
        return None
    if name == "mistral" and "[ARGS]" not in tokenizer.get_vocab():  # the older list of calls
        return None
    if name == "longcat" and "<longcat_arg_key>" not in str(tokenizer.chat_template):
        return _JSON
    return _FORMATS.get(name)

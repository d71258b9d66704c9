"""Tokenizers of models that call tools, in the formats of mlx-lm's parsers."""

from importlib import import_module

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AddedToken

from tests.helpers.models import fast_tokenizer

# Further tokens of each format.
MARKS = {
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "json_tools": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm47": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"],
    "minicpm5": ["<function name=", "</function>", "<param"],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
}  # fmt: skip
# Formats whose tokens are special.
SPECIAL = ("gemma4", "kimi_k2", "kimi_k3", "mistral", "pythonic")
# Template of a chat that shows the tools, the calls and their results.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}[assistant]"
)


def tool_tokenizer(kind: str = "json_tools", thinks: bool = False) -> TokenizerWrapper:
    """A byte-level tokenizer with the tokens and the parser of one format; token 0 is the end."""
    inner = fast_tokenizer()._tokenizer
    inner.add_tokens([AddedToken(mark, special=kind in SPECIAL) for mark in MARKS[kind]])
    if thinks:
        inner.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    inner.chat_template = TEMPLATE + ("<think>" if thinks else "")
    if kind == "longcat":
        inner.chat_template += "{# <longcat_arg_key> #}"
    parser = import_module(f"mlx_lm.tool_parsers.{kind}")
    return TokenizerWrapper(
        inner,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )


def spell(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """A text letter by letter, without tokens of several letters."""
    return [token for character in text for token in tokenizer.encode(character)]

"""Options of the prompt, and its conversion to token ids."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mlx_redrafter.checks import read_file
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.text_options import IgnoreChatTemplate
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


ChatTemplateConfig = Annotated[
    str | None, 'JSON object of options for the chat template, such as {"enable_thinking": false}.'
]
PromptFile = Annotated[Path | None, "File with the prompt, UTF-8 text.", "-f"]
SystemPrompt = Annotated[str | None, "System message, for models with a chat template."]


@dataclass(frozen=True)
class PromptOptions:
    """The prompt, the chat template and the prompt cache."""

    prompt: Annotated[str | None, "The prompt; - reads it from standard input.", "-p"] = None
    prompt_file: PromptFile = None
    ignore_chat_template: IgnoreChatTemplate = False
    chat_template_config: ChatTemplateConfig = None
    system_prompt: SystemPrompt = None
    prompt_cache_file: Annotated[
        str | None, "Continue after the prompt cache in this file, which mlx_lm.cache_prompt wrote."
    ] = None

    def __post_init__(self) -> None:
        parse_template_options(self.chat_template_config)  # checked before anything is loaded
        if self.prompt is None and self.prompt_file is None:
            raise ConfigError("expected a prompt, found none; give --prompt or --prompt-file")
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("expected one prompt, found another in --prompt-file; leave one out")
        if self.prompt == "-" and launched_group() is not None:
            raise ConfigError(
                "--prompt - reads an input that mlx.launch never ends; give the prompt itself"
            )

    def read(self) -> str:
        """Read the prompt, from its file, or from standard input if it is ``-``."""
        if self.prompt_file is not None:
            return read_file(self.prompt_file, "the prompt", "; --prompt - reads standard input")
        if self.prompt == "-":
            return sys.stdin.read().removeprefix("\ufeff")
        return (self.prompt or "").replace("\\n", "\n").replace("\\t", "\t")

    def encode(self, tokenizer: TokenizerWrapper, text: str) -> list[int]:
        """Encode the text of the prompt as `mlx_lm.generate` does.

        After a prompt cache, the encoded prompt leaves out the beginning of the chat template.
        """
        from mlx_redrafter.engine.prompt_encoding import encode_chat, encode_question

        if self.ignore_chat_template or not tokenizer.has_chat_template:
            if self.system_prompt is not None:
                raise ConfigError(
                    "--system-prompt needs a chat template, but the model has none or "
                    "--ignore-chat-template is given; leave it out"
                )
            return encode_question(tokenizer, text, use_template=False)
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        options, follows = self.chat_template_config, self.prompt_cache_file is not None
        given = parse_template_options(options)
        try:
            return encode_chat(tokenizer, messages, given, follows_cache=follows)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; change its options, or use --ignore-chat-template"
            ) from error

    def load_cache(self, model: str | None) -> list[Any] | None:
        """Load the prompt cache from its file, which must name this model; None without a file."""
        path = self.prompt_cache_file
        if path is None:
            return None
        from mlx_lm.models.cache import load_prompt_cache

        try:
            cache, metadata = load_prompt_cache(path, return_metadata=True)
        except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--prompt-cache-file {path} is no cache of mlx_lm.cache_prompt: {error}; make "
                "it again"
            ) from error
        if metadata.get("model") != model:
            raise ConfigError(
                f"--prompt-cache-file was made with model {metadata.get('model')!r}, but --model "
                f"is {model!r}; give the same one"
            )
        return list(cache)


def parse_template_options(given: str | None) -> dict[str, Any]:
    """Parse the value of ``--chat-template-config``, a JSON object."""
    try:
        options = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--chat-template-config must be JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--chat-template-config must be a JSON object, got {options!r}")
    return options

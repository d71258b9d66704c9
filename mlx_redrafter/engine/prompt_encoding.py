"""Prompts and chats to token ids, as `mlx_lm.generate` makes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checks import check_vocabulary, token_ids
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.target import Target

Message = Mapping[str, Any]

# Characters of a long text that are encoded at a time to count its tokens.
PIECE = 1 << 16

# Replaces the last message, to find the text that the template puts before it.
MARKER = "<query>"


class LongPromptError(ConfigError):
    """A text has more tokens than allowed: ``num_tokens``, counted in pieces."""

    def __init__(self, num_tokens: int, limit: int):
        super().__init__(
            f"the prompt has {num_tokens} tokens, at most {limit} are allowed; shorten it"
        )
        self.num_tokens = num_tokens


def encode_prompt(
    tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array, limit: int | None = None
) -> list[int]:
    """Encode a prompt; text gets the special tokens that it does not start with, as in mlx-lm.

    Raise `LongPromptError` for a text of clearly more than ``limit`` tokens, which is not encoded
    whole, and `ConfigError` for a prompt that is neither text nor whole numbers.
    """
    if isinstance(prompt, str):
        starts_special = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return _encode(tokenizer, prompt, limit, add_special_tokens=not starts_special)
    return token_ids("the prompt", prompt, "a text or token ids")


def encode_question(tokenizer: TokenizerWrapper, text: str, use_template: bool = True) -> list[int]:
    """Encode one user message, in the chat format if the model has one.

    Raise `ConfigError` if the chat template rejects the message, or nothing is left of it.
    """
    if use_template and tokenizer.has_chat_template:
        ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
    else:
        ids = _encode(tokenizer, text)
    check_not_empty(ids)
    return ids


def encode_chat(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    follows_cache: bool = False,
    limit: int | None = None,
) -> list[int]:
    """Encode messages with "role" and "content" by the model's chat template, with its options.

    ``add_generation_prompt`` adds the beginning of the assistant's reply. ``follows_cache`` leaves
    out the text that the template puts before the last message, which a stored cache holds. Raise
    `ConfigError` if the template rejects the messages, and `LongPromptError` as `encode_prompt`.
    """
    values = {"add_generation_prompt": add_generation_prompt, **(options or {})}
    text = _render(tokenizer, messages, values)
    if follows_cache:
        marked = [*messages[:-1], {**messages[-1], "content": MARKER}]
        text = text[_render(tokenizer, marked, values).index(MARKER) :]
    return _encode(tokenizer, text, limit, add_special_tokens=False)


def encode_user_turn(tokenizer: TokenizerWrapper) -> tuple[list[int], list[int]]:
    """Encode what a chat template puts before and after a first user message.

    Raise `ConfigError` if it rejects the message, or leaves it out.
    """
    values = {"add_generation_prompt": True}
    text = _render(tokenizer, [{"role": "user", "content": MARKER}], values)
    before, found, after = text.partition(MARKER)
    if not found:
        raise ConfigError(
            "expected the user's message in the model's chat format, found none; give texts"
        )
    parts = before.rstrip(" "), after.strip()
    first, last = (_encode(tokenizer, part, add_special_tokens=False) for part in parts)
    return first, last


def _render(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], options: Mapping[str, Any]
) -> str:
    # A template is a program from the checkpoint and may raise any exception.
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:
        raise ConfigError(f"the model's chat template rejects these messages: {error}") from error


def check_not_empty(prompt: Sequence[int]) -> None:
    """Raise `ConfigError` for a prompt without tokens."""
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")


def _encode(
    tokenizer: TokenizerWrapper, text: str, limit: int | None = None, **options: Any
) -> list[int]:
    try:
        text.encode()  # fails for bytes that Python let pass as lone surrogates
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt must be UTF-8 text: {error}") from error
    if limit is not None and len(text) > max(PIECE, limit):
        _check_length(tokenizer, text, limit)
    return list(tokenizer.encode(text, **options))


def _check_length(tokenizer: TokenizerWrapper, text: str, limit: int) -> None:
    """Encode a long text in pieces, which takes little memory, to see if it has too many tokens.

    A cut can only change the tokens around it; twice the limit is beyond all doubt.
    """
    pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    count = sum(len(tokenizer.encode(one, add_special_tokens=False)) for one in pieces)
    if count > 2 * limit:
        raise LongPromptError(count, limit)


def check_prompt(prompt: list[int], num_cached: int, target: Target) -> None:
    """Check that a target can process a prompt, after the tokens of a cache.

    Raise `ConfigError` if it is empty or too long, or the target has no such token id.
    """
    check_not_empty(prompt)
    check_vocabulary("prompt token ids", prompt, target.vocab_size)
    total, limit = num_cached + len(prompt), target.context_length
    if limit is not None and total > limit:
        cached = f" after {num_cached} cached ones" if num_cached else ""
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens{cached}, the model's context is {limit}; "
            "shorten the prompt"
        )


def limit_text(max_tokens: int, room: int) -> int:
    """Return the maximum length of a text that ends with the context at the latest.

    ``max_tokens`` is -1 for no other limit; ``room`` is what the prompt leaves of the context.
    """
    return max_tokens if 0 < max_tokens <= room else room

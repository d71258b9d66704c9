"""Texts and prompts from files, and the token sequences made from them.

Files are not trusted: errors in a file are reported with its name and line.

- ``*.jsonl``: one object per line with ``"text"``, with ``"messages"`` (a chat), with ``"prompt"``
  (the target generates the answer), or with ``"prompt"`` and ``"completion"``.
- All other names: plain text. Lines ``<|endoftext|>`` divide the text into documents.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from mlx_redrafter.checks import TEXT_ENCODING, parse_line
from mlx_redrafter.engine.prompt_encoding import encode_chat, encode_prompt
from mlx_redrafter.engine.text_comparison import num_same
from mlx_redrafter.errors import ConfigError, DataError, explain

ROLES = ("system", "user", "assistant", "tool", "developer")
# Line between two documents of a plain text.
DOCUMENT_SEPARATOR = "<|endoftext|>"
# Maximum length of a line, in characters; protects the memory from damaged files.
MAX_LINE_CHARS = 2**24
# Guess for cutting long texts before they are tokenised; most languages have 2 to 5.
CHARS_PER_TOKEN = 3

Message = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """A text to train on; ``origin`` is its file and line."""

    text: str
    origin: str


@dataclass(frozen=True)
class Chat:
    """Messages with "role" and "content"; ``origin`` is their file and line.

    The target answers a chat that does not end with an assistant's message.
    """

    messages: list[Message]
    origin: str

    @property
    def is_answered(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def asked(self) -> list[Message]:
        """The messages before the assistant's last reply, which the target would answer."""
        return self.messages[:-1] if self.is_answered else self.messages


Item = Document | Chat


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of n tokens as the target sees it.

    ``tokens`` are int32, shape (n,). ``is_trained``, bool, shape (n,), is True for tokens that the
    target would generate and the drafter should draft, and False for the prompt.
    """

    tokens: NDArray[np.int32]
    is_trained: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(self.is_trained.sum())


def read_items(paths: Iterable[str | Path], lines_are_prompts: bool = False) -> list[Item]:
    items: list[Item] = []
    for path in map(Path, paths):
        num_before = len(items)
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            items += [_parse_row(line, origin) for line, origin in _read_filled_lines(path)]
        elif suffix in (".json", ".gz", ".xz", ".zip", ".parquet"):
            raise DataError(
                f"expected a text or .jsonl file, found {path}; convert or unpack it first"
            )
        elif lines_are_prompts:
            items += [
                Chat([{"role": "user", "content": line}], origin)
                for line, origin in _read_filled_lines(path)
            ]
        else:
            items += _read_documents(path)
        if len(items) == num_before:
            raise DataError(f"expected texts in {path}, found none")
    return items


def _read_filled_lines(path: Path) -> Iterator[tuple[str, str]]:
    return ((line, origin) for line, origin in _read_lines(path) if line.strip())


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with path.open(encoding=TEXT_ENCODING) as file:
            while line := file.readline(MAX_LINE_CHARS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    raise DataError(
                        f"{path}:{number}: expected at most {MAX_LINE_CHARS} characters in a line, "
                        "found more; split the text"
                    )
                yield line.rstrip("\n"), f"{path}:{number}"
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number + 1}: expected UTF-8, found the byte "
            f"{error.object[error.start]:#04x} near here; convert the file"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {explain(error)}") from error


def _read_documents(path: Path) -> Iterator[Document]:
    lines: list[str] = []
    origin = ""
    for line, line_origin in [*_read_lines(path), (DOCUMENT_SEPARATOR, "")]:
        if line.strip() == DOCUMENT_SEPARATOR:
            if text := "\n".join(lines).strip():
                yield Document(text, origin)
            lines = []
        else:
            origin = origin if lines else line_origin
            lines.append(line)


def _parse_row(line: str, origin: str) -> Item:
    try:
        row = parse_line(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: expected a JSON object, found {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{origin}: expected a JSON object, found {type(row).__name__}")
    if "messages" in row:
        return Chat(_check_messages(row["messages"], origin), origin)
    for key in ("text", "prompt", "completion"):
        if key in row and not (isinstance(row[key], str) and row[key].strip()):
            raise DataError(f'{origin}: expected "{key}" to be a text, found {row[key]!r:.40}')
    if "prompt" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
        if "completion" in row:
            messages.append({"role": "assistant", "content": row["completion"]})
        return Chat(messages, origin)
    if "text" in row:
        return Document(row["text"], origin)
    raise DataError(
        f'{origin}: expected "text", "prompt" or "messages", found the keys '
        f"{', '.join(map(repr, list(row)[:5])) or '(none)'}"
    )


def _check_messages(messages: object, origin: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{origin}: expected "messages" to be a list, found {messages!r:.40}')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(
                f"{origin}: expected message {number} to have one of the roles "
                f"{', '.join(ROLES)}, found {message!r:.60}"
            )
        if not isinstance(message.get("content"), str):
            raise DataError(f"{origin}: expected message {number} to have a text as its content")
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        raise DataError(f"{origin}: expected a message before the assistant's, found none; add it")
    return messages


class Encoder:
    """Encoder of items into token sequences, with the prompt encoding of decoding."""

    def __init__(self, tokenizer: TokenizerWrapper, sequence_length: int, vocab_size: int):
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size

    def encode(self, item: Item) -> Iterator[TokenSequence]:
        """Encode a text or an answered chat as sequences of at most `sequence_length` tokens."""
        if isinstance(item, Document):
            yield from self._encode_text(item)
        elif self.tokenizer.has_chat_template:
            yield from self._encode_chat(item)
        else:
            prompt = self.encode_prompt(item)
            answer = item.messages[-1]["content"]
            reply = list(self.tokenizer.encode(answer, add_special_tokens=False))
            is_trained = [False] * len(prompt) + [True] * len(reply)
            yield from self._cut([*prompt, *reply], is_trained, item.origin)

    def encode_prompt(self, item: Chat) -> list[int]:
        """Encode a chat up to the beginning of the assistant's last reply."""
        if self.tokenizer.has_chat_template:
            ids = self._apply_template(item.asked, item.origin, opens=True)
        elif len(item.asked) != 1 or item.asked[0]["role"] != "user":
            raise DataError(
                f"{item.origin}: expected a model with a chat template for chats, found one "
                'without; give "text" or "prompt"'
            )
        else:
            ids = encode_prompt(self.tokenizer, item.asked[0]["content"])
        self._check_fit(ids, item.origin)
        return ids

    def _encode_text(self, document: Document) -> Iterator[TokenSequence]:
        for piece in split_text(document.text, CHARS_PER_TOKEN * self.sequence_length):
            # Silence the warning about pieces longer than the model's context: they are cut below.
            ids = list(self.tokenizer.encode(piece, verbose=False))
            plain = list(self.tokenizer.encode(piece, add_special_tokens=False, verbose=False))
            # Special tokens before a text are part of the prompt and never drafted.
            num_given = len(ids) - len(plain) if ids[-len(plain) :] == plain else 0
            prefix, body = ids[:num_given], ids[num_given:]
            room = self.sequence_length - num_given
            for start in range(0, len(body), room):
                part = body[start : start + room]
                is_trained = [False] * num_given + [True] * len(part)
                yield from self._cut([*prefix, *part], is_trained, document.origin)

    def _encode_chat(self, item: Chat) -> Iterator[TokenSequence]:
        """Encode all replies as one sequence, or several if the template rewrites earlier turns."""
        tokens: list[int] = []
        is_trained: list[bool] = []
        stops = self.tokenizer.eos_token_ids
        for turn, message in enumerate(item.messages):
            if message["role"] != "assistant" or turn == 0:  # the model replies to something
                continue
            prompt = self._apply_template(item.messages[:turn], item.origin, opens=True)
            full = self._apply_template(item.messages[: turn + 1], item.origin, opens=False)
            if any(text[: len(tokens)] != tokens for text in (prompt, full)):
                yield from self._cut(tokens, is_trained, item.origin)
                tokens, is_trained = [], []
            start = num_same(prompt, full)
            # After the reply's stop token; a template may add a line break there.
            ends = (i + 1 for i, token in enumerate(full) if i >= start and token in stops)
            end = next(ends, len(full))
            is_trained = [*is_trained, *[False] * (start - len(tokens)), *[True] * (end - start)]
            is_trained += [False] * (len(full) - end)
            tokens = full
        yield from self._cut(tokens, is_trained, item.origin)

    def _apply_template(self, messages: list[Message], origin: str, opens: bool) -> list[int]:
        """Encode messages, and the opening of a reply if ``opens``."""
        try:
            return encode_chat(self.tokenizer, messages, add_generation_prompt=opens)
        except ConfigError as error:
            raise DataError(f"{origin}: {error}") from error

    def _cut(self, tokens: list[int], trained: list[bool], origin: str) -> Iterator[TokenSequence]:
        """Cut a sequence, and leave it out if no token is left to train on."""
        ids = np.array(tokens[: self.sequence_length], dtype=np.int32)
        self._check_fit(tokens, origin)
        if any(trained[: len(ids)]):
            yield TokenSequence(ids, np.array(trained[: len(ids)], dtype=np.bool_))

    def _check_fit(self, ids: Sequence[int], origin: str) -> None:
        if ids and max(ids) >= self.vocab_size:
            raise DataError(
                f"{origin}: expected token ids below {self.vocab_size}, found {max(ids)}; the "
                "tokenizer does not fit the model"
            )


def split_text(text: str, max_chars: int) -> Iterator[str]:
    """Cut a text into pieces of at most ``max_chars`` characters, at line ends or spaces if any."""
    start = 0
    while len(text) - start > max_chars:
        end = start + max_chars
        for mark in ("\n", " "):
            if (cut := text.rfind(mark, start + max_chars // 2, end)) > 0:
                end = cut + 1
                break
        yield text[start:end]
        start = end
    if text[start:].strip():
        yield text[start:]

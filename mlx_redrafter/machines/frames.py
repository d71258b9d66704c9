"""Frames, the messages between rank 0 and the other ranks: a verb, integers and a short text.

A frame is data for a fixed set of verbs. Nothing in it is ever executed, unpickled or imported.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import BinaryIO, NamedTuple


class Do(IntEnum):
    """Verbs; the numbers of each are listed beside it.

    A draft is described by four numbers, as in `drafts.describe`.
    """

    BEAT = 0  # a sign of life
    HELLO = 1  # text: who a rank is
    CHECK = 2  # text: digest of the model's config.json, and the model's name
    SPLIT = 3  # load the model's part of this rank
    YES = 4  # done
    NO = 5  # text: why a rank cannot do it
    FAIL = 6  # text: why a rank ends
    END = 7  # no more passes
    # Passes. Each takes the tokens of rank 0 from the group.
    ADVANCE = 10  # cache
    CHUNK = 11  # cache, number of tokens, whether the last layer's output is computed
    VERIFY = 12  # cache, draft
    BATCH = 13  # batch, nodes of a tree; of every slot draft, tokens kept whatever happens
    CALL = 14  # cache or 0 for none, number of tokens
    # Operations on caches.
    OPEN = 20  # cache, length, fields of its quantization if it has one
    COMMIT = 21  # cache, path
    SETTLE = 22  # cache, length
    RESERVE = 23  # cache, rows
    DROP = 24  # cache
    KEEP = 30  # batch, slot, path
    INSERT = 31  # batch, slot, cache
    LEAVE = 32  # batch, slot, cache or 0
    RESIZE = 33  # batch, slots of the new size, rows, old slots


class Frame(NamedTuple):
    """A message."""

    do: Do
    numbers: tuple[int, ...] = ()
    text: str = ""


# Verb, number of integers, bytes of text.
_HEAD = struct.Struct("<BHH")
# Maximum of both counts, that of their fields.
_MOST_ITEMS = 2**16 - 1
# Largest integer of a frame, which also stands for larger ones.
MOST = 2**31 - 1


def pack(frame: Frame) -> bytes:
    """Write a frame as bytes; cuts a text that is too long."""
    text = frame.text.encode(errors="replace")[:_MOST_ITEMS]
    head = _HEAD.pack(frame.do, len(frame.numbers), len(text))
    return head + struct.pack(f"<{len(frame.numbers)}i", *frame.numbers) + text


def read(stream: BinaryIO) -> Frame | None:
    """Read the next frame, of at most 320 KiB; return None at the end of the stream.

    Raises:
        ValueError: The bytes are no frame.
    """
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    verb, count, size = _HEAD.unpack(head)
    body = stream.read(4 * count + size)
    if len(body) < 4 * count + size:
        return None
    numbers = struct.unpack(f"<{count}i", body[: 4 * count])
    return Frame(Do(verb), numbers, body[4 * count :].decode(errors="replace"))

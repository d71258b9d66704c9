"""Frames, the messages between rank 0 and the other ranks: a verb and its values, a JSON line.

A frame is data for a fixed set of verbs. Nothing in it is ever executed, unpickled or imported.
"""

import json
from enum import StrEnum, auto
from typing import Any, BinaryIO, NamedTuple

# Maximum number of bytes of a frame, far more than the paths of a large batch have.
MOST_BYTES = 2**20


class Do(StrEnum):
    """Verbs, and beside each its values: integers unless it says text.

    Those of passes and caches are names of the methods of `Follower`.
    """

    BEAT = auto()  # a sign of life
    HELLO = auto()  # texts: who a rank is
    CHECK = auto()  # texts: the model's digest and name, the adapter's, or empty ones
    SPLIT = auto()  # load the model's part of this rank
    YES = auto()  # done
    NO = auto()  # text: why a rank cannot do it
    FAIL = auto()  # text: why a rank ends
    END = auto()  # no more passes
    # Passes. Each takes the tokens of rank 0 from the group. Drafts are those of `leader.describe`.
    ADVANCE = auto()  # cache
    CHUNK = auto()  # cache, number of tokens, whether the last layer's output is computed
    VERIFY = auto()  # cache, draft
    BATCH = auto()  # batch, nodes of a tree; of every slot its draft, and its floor
    CALL = auto()  # cache, number of tokens
    # Operations on caches.
    OPEN = auto()  # cache, length, fields of its quantization if it has one
    COMMIT = auto()  # cache, path
    TRIM_TO = auto()  # cache, length
    RESERVE = auto()  # cache, rows
    DROP = auto()  # cache, batch or copy
    # Copies of parts of caches, for later texts.
    COPY_ENTRIES = auto()  # copy, cache, start, end
    COPY_STATES = auto()  # copy, cache
    FILL = auto()  # cache, length, fields of its quantization, copies and lengths, copy of states
    # Operations on the caches of batches.
    KEEP = auto()  # batch, slot, path
    INSERT = auto()  # batch, slot, cache
    LEAVE = auto()  # batch, slot, cache or 0
    RESIZE = auto()  # batch, slots of the new size, rows, old slots


class Frame(NamedTuple):
    do: Do
    values: tuple[Any, ...] = ()


def pack(do: Do, *values: Any) -> bytes:
    return json.dumps([do, *values]).encode() + b"\n"


def read(stream: BinaryIO) -> Frame | None:
    """Read the next frame; None at the end of the stream. Other bytes raise `ValueError`."""
    line = stream.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        if len(line) == MOST_BYTES:
            raise ValueError(f"expected a frame of at most {MOST_BYTES} bytes, found a longer one")
        return None
    try:
        do, *values = json.loads(line)
        return Frame(Do(do), tuple(values))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected a verb and its values, found others: {error}") from error

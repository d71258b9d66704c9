"""Frames: what is written is read again, and no bytes do more than fail."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.machines.line import MOST_BYTES, Do, pack, read

VALUES = st.lists(st.integers() | st.text(max_size=40) | st.lists(st.integers()), max_size=40)
FRAMES = st.tuples(st.sampled_from(Do), VALUES)


@given(st.lists(FRAMES, max_size=5))
def test_frames_are_read_as_they_were_written(frames):
    stream = io.BytesIO(b"".join(pack(do, *values) for do, values in frames))
    assert [read(stream) for _ in frames] == [(do, tuple(values)) for do, values in frames]
    assert read(stream) is None


def test_foreign_bytes_are_an_error():
    for line in (b"\n", b"5\n", b'["eval", 1]\n', b"[[1]]\n", b"\xff\n", b"[" * 10**5 + b"\n"):
        with pytest.raises(ValueError, match=r"."):
            read(io.BytesIO(line))


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_a_frame_the_end_or_an_error(data):
    try:
        frame = read(io.BytesIO(data))
    except ValueError:
        return
    assert frame is None or json.loads(data.partition(b"\n")[0])


def test_frames_of_any_length_are_not_read():
    with pytest.raises(ValueError, match="at most"):
        read(io.BytesIO(b"1" * 2 * MOST_BYTES))

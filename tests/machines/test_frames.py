"""Frames: what is written is read again, and no bytes do more than fail."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.machines.frames import Do, Frame, pack, read

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(tuple)
FRAMES = st.builds(Frame, st.sampled_from(Do), INTS, st.text(max_size=40))


@given(st.lists(FRAMES, max_size=5))
def test_frames_are_read_as_they_were_written(frames: list[Frame]) -> None:
    stream = io.BytesIO(b"".join(map(pack, frames)))
    assert [read(stream) for _ in frames] == frames
    assert read(stream) is None


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_frame_the_end_or_an_error(data: bytes) -> None:
    is_known = bool(data) and data[0] in list(Do)
    if len(data) < 5 or is_known:
        frame = read(io.BytesIO(data))
        assert frame is None or frame.do == data[0]
        return
    with suppress(ValueError):
        assert read(io.BytesIO(data)) is None  # cut before its end


def test_a_long_text_is_cut() -> None:
    found = read(io.BytesIO(pack(Frame(Do.FAIL, (), "x" * 10**6))))
    assert found is not None
    assert len(found.text) == 2**16 - 1


def test_numbers_that_are_no_int32_are_refused() -> None:
    with pytest.raises(Exception, match="format requires"):
        pack(Frame(Do.COMMIT, (2**31,)))

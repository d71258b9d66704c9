"""Hundreds of damaged checkpoints: converted or refused in one line, never anything else.

Some of the seeds carry a call of ``os.system``, so that damage could also set it free.
"""

import io
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.proposers.medusa import load as load_medusa
from mlx_redrafter.proposers.redrafter import load as load_drafter
from tests.convert import handmade
from tests.convert.handmade import SYSTEM, text

MAX_SECONDS = 3.0
SMALL = {**handmade.CONFIG, "hidden_size": 2, "exit_dim": 3, "vocab_size": 5, "num_draft_layers": 1}
MEDUSA = "medusa"
MEDUSA_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1}
FORBIDDEN_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "pickle.")


class Watch:
    """Notes what Python's audit events say was done while it is on; hooks cannot be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self.note)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(FORBIDDEN_EVENTS):
            self.events.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def zipped(content: bytes, values: Mapping[str, np.ndarray]) -> bytes:
    """An intact archive around a pickle, which damage to archives would rarely let through."""
    file = io.BytesIO()
    handmade.write_zip(file, content, values)
    return file.getvalue()


# Name of a file, what of it is damaged, and how that becomes the file afterwards.
Seed = tuple[str, bytes, Callable[[bytes], bytes]]


def seeds_of(values: Mapping[str, np.ndarray], file: str, prefix: str = "") -> dict[str, Seed]:
    """A file that holds a pickle, and safetensors."""
    whole, intact = save(dict(values)), handmade.pickled(values)
    start = 8 + int.from_bytes(whole[:8], "little")
    in_zip, with_data = partial(zipped, values=values), partial(handmade.headed, data=whole[start:])
    seeds: dict[str, Seed] = {
        f"{prefix}safetensors": ("model.safetensors", whole, bytes),
        f"{prefix}header": ("model.safetensors", whole[8:start], with_data),
    }
    for end, content in (("", intact), (", hostile", intact[:-2] + text("x") + SYSTEM + b"u.")):
        seeds[f"{prefix}zip{end}"] = (file, in_zip(content), bytes)
        seeds[f"{prefix}pickle{end}"] = (file, content, in_zip)
    return seeds


SEEDS = seeds_of(handmade.tensors(SMALL), "pytorch_model.bin")
SEEDS |= seeds_of(handmade.medusa(2, hidden=2, rows=5), "medusa_lm_head.pt", f"{MEDUSA}, ")
# Bytes that mean something to the formats: opcodes, magic numbers, sizes.
TELLING = st.sampled_from(
    [
        *(b"(", b"R", b"t", b"u", b"b", b"c", b"Q", b".", b"\x85", b"\x93", b"S", b"V", b"h\x00"),
        *(b"q\x00", b"PK\x01\x02", b"PK\x05\x06", b"\xff" * 4, b"\x00" * 8, b"\x7f" * 8),
        *(b'"', b"}", b"[", SYSTEM),
    ]
)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, bytes]:
    """One to six edits of a seed: overwrite, insert, delete, repeat, truncate."""
    seed = draw(st.sampled_from(sorted(SEEDS)))
    _, original, _ = SEEDS[seed]
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, max(len(content) - 1, 0)))
        length = draw(st.integers(0, 16))
        piece = draw(st.one_of(TELLING, st.binary(min_size=1, max_size=9)))
        edit = draw(st.sampled_from(("overwrite", "insert", "delete", "repeat", "truncate")))
        if edit == "overwrite":
            content[start : start + len(piece)] = piece
        elif edit == "insert":
            content[start:start] = piece
        elif edit == "delete":
            del content[start : start + length]
        elif edit == "repeat":
            content[start:start] = content[start : start + length] * 3
        else:
            del content[max(start, 8) :]
    return seed, bytes(content)


def convert_damaged(content: bytes, seed: str, watch: Watch) -> bool:
    """Convert one damaged file in a fresh folder; True if it could still be used."""
    file, _, complete = SEEDS[seed]
    is_medusa = seed.startswith(MEDUSA)
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "source", Path(name) / "out"
        handmade.write_config(folder, MEDUSA_CONFIG if is_medusa else SMALL)
        (folder / file).write_bytes(complete(content))
        start = time.process_time()
        watch.is_on = True
        refusal = None
        try:
            handmade.convert(folder, out, dtype="float32")
        except RedrafterError as error:
            refusal = str(error)
        finally:
            watch.is_on = False
        assert time.process_time() - start < MAX_SECONDS
        if refusal is not None:
            assert refusal.isprintable()
            assert [path.name for path in Path(name).iterdir()] == ["source"]
            return False
        assert sorted(path.name for path in Path(name).iterdir()) == ["out", "source"]
        network = load_medusa(out) if is_medusa else load_drafter(out)
        assert network.config.head_rows >= 1
        return True


@settings(max_examples=600, derandomize=True, database=None)
@given(mutation=mutations())
def test_damaged_files_are_converted_or_refused(mutation, watch):
    seed, content = mutation
    convert_damaged(content, seed, watch)
    assert watch.events == []
    assert not Path("executed").exists()


def test_the_seeds_themselves(watch):
    for seed, (_, content, _) in SEEDS.items():
        assert convert_damaged(content, seed, watch) == ("hostile" not in seed)
    assert watch.events == []


def test_the_watch_sees_what_must_not_happen(watch):
    import os
    import pickle

    watch.is_on = True
    os.system("true")
    with pytest.raises(AttributeError):
        pickle.loads(b"cbuiltins\nnothing\n.")
    watch.is_on = False
    seen = [event.split()[0] for event in watch.events]
    watch.events.clear()
    assert "os.system" in seen
    assert "pickle.find_class" in seen

"""Files made to do harm: refused by one line, in bounded time and memory, and never executed."""

import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlx_redrafter.convert.pickles import MAX_PICKLE_BYTES
from tests.convert import handmade
from tests.convert.handmade import SYSTEM, headed, refusal, state_dict, storage, tensor, text

# Of the processor, twice what the longest pickle takes; a hang runs into the timeout of pytest.
MAX_SECONDS = 10.0
MAX_EXTRA_BYTES = 300 * 2**20
PROTO, STOP = b"\x80\x02", b"."
# A function and 500,000 arguments, which every call would copy, in the memo.
PARAMETER = b"]ctorch._utils\n_rebuild_parameter\nq\x00"
MANY_ARGUMENTS = b"(" + tensor(storage("0", 1), (1,), (1,)) + b"N" * 500_000 + b"tq\x01"
# Python hashes numbers modulo this one, so its multiples are all alike to a dict.
HASHED = 2**61 - 1


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for one hostile checkpoint; afterwards nothing was executed, written or hung."""
    folder = tmp_path / "source"
    handmade.write_config(folder)
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield folder
    assert time.process_time() - start < MAX_SECONDS
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert extra * (1 if os.uname().sysname == "Darwin" else 1024) < MAX_EXTRA_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def refused_pickle(folder: Path, content: bytes) -> str:
    """The message for a pickle in an archive."""
    handmade.write_zip(folder / "pytorch_model.bin", content, {})
    return refusal(folder)


def test_a_pickle_without_an_archive(source):
    (source / "model.pt").write_bytes(pickle.dumps({"x": 1}, 2))
    assert "before PyTorch 1.6; save it again" in refusal(source)


def test_the_function_is_named_and_the_user_is_warned(source):
    message = refused_pickle(source, state_dict({"rnn_u.bias": SYSTEM}))
    assert "asks for 'posix.system'" in message
    assert "nothing was executed" in message


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n",
        b"ctorch.hub\nload\n",
        b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n",
        b"ccollections\nOrderedDict.__init__\n",
        b"c__main__\nDrafter\n)\x81",
        text("os") + text("system") + b"\x93",
        text("builtins") + text("eval") + b"\x93(" + text("open('executed', 'w')") + b"tR",
        b"(" + text("touch executed") + b"ios\nsystem\n",
        b"(cos\nsystem\n" + text("touch executed") + b"o",
        b"Pan id\n",
        b"\x82\x01",
        b"ccollections\nOrderedDict\n" + b"(" + SYSTEM + b"tR",
        b"ctorch._utils\n_rebuild_parameter\n(" + SYSTEM + b"\x89NtR",
        b"ccollections\nOrderedDict\n)R" + b"}" + text("__class__") + SYSTEM + b"sb",
        b"ctorch._utils\n_rebuild_tensor_v2\n}b",
        handmade.number(3) + b")R",
        b"ccollections\nOrderedDict\n" * 1000 + b")" + b"R" * 1000,
    ],
)
def test_no_way_to_a_call(source, opcodes):
    refused_pickle(source, state_dict({"x": opcodes}))


@pytest.mark.parametrize(
    "content",
    [
        PROTO + b"N" + b"".join(b"q\x00h\x00h\x00\x86" for _ in range(1000)) + STOP,
        PROTO + b"]q\x00h\x00a" + STOP,
        PROTO + b"}q\x00" + text("x") + b"h\x00s" + STOP,
        PROTO + b")" * 200_000 + b"\x85" * 200_000 + STOP,
        PROTO + b")" + b"\x85" * 500_000 + STOP,
        PROTO + b"(" * 500_000 + STOP,
        PROTO + b"]" + b"]" * 400_000 + b"a" * 400_000 + STOP,
        PROTO + b"}" + (b"(" + b")\x85q\x00h\x00h\x00\x86q\x00" * 50 + b"N" + b"u") + STOP,
        PROTO + b"h\x07" + STOP,
        PROTO + b"N" + b"r\xff\xff\xff\xff" * 1000 + STOP,
        PROTO + b"R" + STOP,
        PROTO + b"(tb" + STOP,
        PROTO + b"N",
        PROTO + b"\x8a\xff" + b"\x7f" * 255 + STOP,
        PROTO + b"\x8b\xff\xff\xff\x7f" + STOP,
        PROTO + b"X\xff\xff\xff\x7fabc" + STOP,
        PROTO + b"\x8d" + b"\xff" * 8 + STOP,
        PROTO + b"L" + b"9" * 900_000 + b"L\n" + STOP,
        PROTO + b"I" + b"9" * 900_000 + b"\n" + STOP,
        PROTO + b"c" + b"a" * 900_000 + STOP,
        PROTO + b"X\x03\x00\x00\x00\xed\xa0\x80" + STOP,
        PROTO + PARAMETER + MANY_ARGUMENTS + b"h\x00h\x01R" * 100_000 + STOP,
        PROTO
        + b"}("
        + b"".join(handmade.number(k * HASHED) + b"N" for k in range(1, 70_000))
        + b"u"
        + STOP,
        b"\x80\xff" + STOP,
        b"",
    ],
)
def test_memo_tricks_and_absurd_claims(source, content):
    refused_pickle(source, content)


def test_long_pickles_are_not_read(source):
    message = refused_pickle(source, PROTO + b"N0" * MAX_PICKLE_BYTES + b"N" + STOP)
    assert f"at most {MAX_PICKLE_BYTES} bytes" in message


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "size"),
    [
        ((10**6, 10**6), (0, 0), 0, 1),
        ((2, 2), (0, 1), 0, 3),
        ((3,), (2,), 0, 4),
        ((2,), (-1,), 1, 4),
        ((-2, -2), (1, 1), 0, 4),
        ((2**40, 2**40, 0), (1, 1, 1), 0, 4),
        ((1,) * 100_000, (1,) * 100_000, 0, 4),
        ((2,), (1, 1), 0, 4),
        ((4,), (1,), 0, 2**62),
        ((4,), (1,), 0, 2**1000),
    ],
)
def test_tensors_that_exceed_their_storage(source, shape, strides, offset, size):
    values = {"x": np.zeros(4, np.float32)}
    content = state_dict({"x": tensor(storage("0", size), shape, strides, offset)})
    handmade.write_zip(source / "pytorch_model.bin", content, values)
    refusal(source)


def test_a_name_twice_in_a_pickle(source):
    values = handmade.tensors()
    content = handmade.pickled(values)
    again = text("rnn_u.bias") + tensor(storage("0", 12 * 16), (8,), (1,)) + b"u."
    handmade.write_zip(source / "pytorch_model.bin", content[:-2] + again, values)
    assert "the key 'rnn_u.bias' twice" in refusal(source)


def test_names_cannot_write_to_the_terminal(source):
    name = "\x1b[2J\n" + "x" * 100_000
    handmade.write(source, handmade.tensors() | {name: np.zeros(1, np.float32)})
    assert "\\x1b[2J" in refusal(source)


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "a\\b", "data/../../x"])
def test_archives_that_lead_outside(source, name):
    handmade.write_zip(source / "pytorch_model.bin", handmade.pickled({}), {})
    with zipfile.ZipFile(source / "pytorch_model.bin", "a") as archive:
        archive.writestr(name, b"x")
    assert "leads outside" in refusal(source)


def test_a_zip_bomb_is_not_unpacked(source):
    values = handmade.tensors()
    path = source / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", handmade.pickled(values))
        with archive.open("model/data/0", "w") as member:
            for _ in range(100):
                member.write(bytes(2**20))
    assert "expected uncompressed members" in refusal(source)


def test_a_name_twice_in_an_archive(source):
    path = source / "pytorch_model.bin"
    handmade.write(source, handmade.tensors(), file=path.name)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/data.pkl", state_dict({"x": SYSTEM}))
    assert "two members named 'model/data.pkl'" in refusal(source)


def test_members_that_overlap(source):
    """Many members that share one range of bytes claim more than the file holds."""
    path = source / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", handmade.pickled({}))
        archive.writestr("model/data/0", bytes(100_000))
        first = archive.getinfo("model/data/0")
        for i in range(1, 50):
            copy = zipfile.ZipInfo(f"model/data/{i}")
            copy.header_offset, copy.CRC = first.header_offset, first.CRC
            copy.file_size = copy.compress_size = first.file_size
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
    assert "overlap" in refusal(source) or "damaged" in refusal(source)


def test_a_directory_that_claims_gigabytes(source):
    path = source / "pytorch_model.bin"
    handmade.write_zip(path, handmade.pickled({}), {})
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    content[0:0] = bytes(4 * 2**20)
    content[0:4] = b"PK\x03\x04"
    end += 4 * 2**20
    struct.pack_into("<I", content, end + 12, 3 * 2**20)
    path.write_bytes(bytes(content))
    assert "directory" in refusal(source)


def test_truncated_files(source):
    """At any length at all, a truncated file is refused."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        handmade.write(source, handmade.tensors(), file=name)
        content = (source / name).read_bytes()
        for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 100, len(content) - 1):
            (source / name).write_bytes(content[:length])
            refusal(source)
        (source / name).unlink()


ENTRY = '"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "content",
    [
        headed(b"{}", claim=2**64 - 1),
        headed(b"{}", claim=99_000_000),
        headed(b"{" + b" " * 5_000_000 + b"}"),
        headed(b'{"x":' * 100_000),
        headed(f"{{{ENTRY},{ENTRY}}}".encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("[2]", "[-2]").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("[2]", "[4611686018427387906]").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("[2]", f"[2{',1' * 10**6}]").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("[0,8]", "[8,0]").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("[0,8]", "[1000,1008]").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".replace("F32", "F99").encode(), bytes(8)),
        headed(f"{{{ENTRY}}}".encode(), bytes(7)),
        headed(b'{"__metadata__":{"a":"b","a":"c"}}'),
        headed(b'{"x":1}'),
        b"",
    ],
)
def test_hostile_safetensors(source, content):
    (source / "model.safetensors").write_bytes(content)
    refusal(source)


@pytest.mark.parametrize(
    "content",
    [
        b"{" + b" " * (2**24 + 1) + b"}",
        b'{"a":' * 100_000,
        b'{"hidden_size": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe",
        b"[]",
        b"",
        json.dumps({"hidden_size": 2**24, "exit_dim": 2**24, "vocab_size": 2**24}).encode(),
    ],
)
def test_hostile_configs(source, content):
    handmade.write(source, handmade.tensors())
    (source / "config.json").write_bytes(content)
    refusal(source)


def test_a_pickled_module_is_refused_with_a_hint(source):
    message = refused_pickle(source, pickle.dumps({"model": io.StringIO()}, 2))
    assert "state_dict" in message

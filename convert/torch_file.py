"""Weight files of ``torch.save``, in the zip format that it writes since PyTorch 1.6 of 2020.

`pickles.py` reads the pickles; this module locates the values. Nothing is unpacked: a stored member
of an archive is a range of bytes of the archive.
"""

import io
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import mlx.core as mx

from mlx_redrafter.convert.pickles import MAX_PICKLE_BYTES, PickledTensor, read_pickle
from mlx_redrafter.convert.stored import StoredTensor, read_strided
from mlx_redrafter.errors import CheckpointError, describe_error, quote

_ZIP_MAGIC = b"PK\x03\x04"
# Keys of the state dict in files of training scripts that save more than the state dict.
_WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a state dict that ``torch.save`` wrote, without their values."""
    with path.open("rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
    if magic == _ZIP_MAGIC:
        return _read_zip(path)
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path} is a plain pickle, as torch.save wrote before PyTorch 1.6; save it again with "
            "a newer torch.save"
        )
    raise CheckpointError(
        f"expected a file written by torch.save, found one that starts with {magic!r}: {path}"
    )


class _Member(NamedTuple):
    start: int
    size: int


class _BoundedReader(io.BufferedReader):
    """A reader that raises an error on reads longer than the directory of any checkpoint."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"its directory takes {size} bytes, expected a few thousand")
        return super().read(size)


def _read_zip(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        members = _list_zip_members(path, file)
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"expected one data.pkl in the archive {path}, found {len(pickles)}; save the "
                "checkpoint with torch.save"
            )
        prefix = pickles[0].removesuffix("data.pkl")
        order = _read_member(path, file, members.get(f"{prefix}byteorder"), b"little")
        if order != b"little":
            raise CheckpointError(f"expected little-endian values in {path}, found {order[:16]!r}")
        stream = io.BytesIO(_read_member(path, file, members[pickles[0]], b""))
    tensors = _extract_state_dict(read_pickle(stream, f"data.pkl in {path}"), path)
    return {
        name: _locate_values(path, name, tensor, members.get(f"{prefix}data/{tensor.storage.key}"))
        for name, tensor in tensors.items()
    }


def _list_zip_members(path: Path, file: BinaryIO) -> dict[str, _Member]:
    """Locate each member; raise an error for archives that torch.save never writes.

    Checksums are not verified, since torch has an option not to compute them.
    """
    file_size = path.stat().st_size
    members: dict[str, _Member] = {}
    for info in _read_zip_directory(path):
        name = info.filename
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise CheckpointError(f"{path} has a member that leads outside it: {quote(name)}")
        if name in members:
            raise CheckpointError(f"{path} has two members named {quote(name)}")
        is_stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if not is_stored or info.compress_size != info.file_size:
            raise CheckpointError(
                f"expected uncompressed members in {path}, as torch.save writes them, "
                f"found {quote(name)} of {info.compress_size} bytes that claims {info.file_size}"
            )
        members[name] = _Member(_find_content(path, file, info), info.file_size)
    if any(member.start + member.size > file_size for member in members.values()):
        raise CheckpointError(f"{path} is truncated; download it again")
    if sum(member.size for member in members.values()) > file_size:
        raise CheckpointError(
            f"expected separate members in {path}, as torch.save writes them, found overlaps"
        )
    return members


def _read_zip_directory(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with _BoundedReader(io.FileIO(path)) as reader, zipfile.ZipFile(reader) as archive:
            return archive.infolist()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise CheckpointError(
            f"{path} is truncated or a damaged archive ({describe_error(error)}); download it again"
        ) from error


def _find_content(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Find the offset of a member's bytes, after the local header (30 bytes, name, extra field)."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) != 30 or not header.startswith(_ZIP_MAGIC):
        raise CheckpointError(
            f"expected the member {quote(info.filename)} at byte {info.header_offset} of {path}, "
            "found none; download the file again"
        )
    name_size, extra_size = struct.unpack("<HH", header[26:])
    return info.header_offset + 30 + name_size + extra_size


def _read_member(path: Path, file: BinaryIO, member: _Member | None, default: bytes) -> bytes:
    if member is None:
        return default
    if member.size > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"expected a pickle of at most {MAX_PICKLE_BYTES} bytes in {path}, found "
            f"{member.size}; save the model's state_dict() alone"
        )
    file.seek(member.start)
    return file.read(member.size)


def _extract_state_dict(value: object, path: Path) -> dict[str, PickledTensor]:
    """Extract the dict of tensors from ``value``, or from one of its entries `_WRAPPERS`."""
    if isinstance(value, dict):
        wrapped = (value[key] for key in _WRAPPERS if isinstance(value.get(key), dict))
        value = next(wrapped, value)
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"expected a state dict in {path}, found no dict of tensors")
    for key, item in value.items():
        if type(key) is not str or type(item) is not PickledTensor:
            raise CheckpointError(
                f"expected named tensors only in {path}, found {type(item).__name__} under "
                f"{quote(str(key))}; save the model's state_dict() alone"
            )
    return dict(value)


def _locate_values(
    path: Path, name: str, tensor: PickledTensor, member: _Member | None
) -> StoredTensor:
    storage = tensor.storage
    item_size = 1 if storage.dtype == "bool" else getattr(mx, storage.dtype).size
    expected = storage.size * item_size
    if member is None or member.size != expected:
        found = "none" if member is None else f"{member.size} bytes"
        raise CheckpointError(
            f"expected {expected} bytes of values for {quote(name)} in {path}, found {found}"
        )
    start = member.start + tensor.offset * item_size
    read = partial(read_strided, path, storage.dtype, tensor.shape, tensor.strides, start)
    return StoredTensor(storage.dtype, tensor.shape, read)

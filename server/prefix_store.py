"""Arrays of kept prompts in memory and on the disk, each bounded in bytes, by name.

The arrays used least recently go first. A file appears whole or not at all, its name has the
checksum of its content, and a damaged one is set aside. One thread of its own writes the files, so
that no text waits for the disk. A disk that is full ends the writing, never a request.
"""

import logging
import os
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_redrafter.errors import explain, first_line
from mlx_redrafter.target.caches.stored_cache import Arrays
from mlx_redrafter.thread_streams import end_streams_with_thread

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
# Prefix of files that are being written.
UNFINISHED = "unfinished-"
# Bytes of a file that are read at a time for its checksum.
BLOCK = 1 << 22
# Maximum size in bytes of arrays that wait to be written; others stay in memory only.
MAX_PENDING = 1 << 30


class PrefixStore:
    """Arrays by name; one thread uses it, next to the thread that writes.

    Args:
        max_bytes: Maximum size of the arrays in memory; 0 keeps nothing at all.
        folder: Folder of the files; None to keep everything in memory only.
        max_disk_bytes: Maximum size of the files.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None, max_disk_bytes: int = 0):
        self.max_bytes = max_bytes
        self._max_disk_bytes = max_disk_bytes
        self._folder = folder
        self._memory: OrderedDict[str, Arrays] = OrderedDict()
        self.nbytes = 0
        self._paths: dict[str, Path] = {}
        # Arrays that wait to be written. Both threads change these only by single operations.
        self._pending: dict[str, Arrays] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._is_full = False
        if folder is not None and max_bytes and max_disk_bytes:
            self._open(folder)

    @property
    def is_on_disk(self) -> bool:
        """Whether arrays are kept for later runs."""
        return self._writer is not None

    def has(self, name: str) -> bool:
        return name in self._memory or name in self._paths or name in self._pending

    def get(self, name: str) -> Arrays | None:
        """Return arrays; None if they are gone or their file is damaged."""
        found = self._memory.get(name)
        if found is None:
            pending = self._pending.get(name)
            found = self._read(name) if pending is None else pending
            if found is not None:
                self._keep(name, found)
        return found

    def put(self, name: str, arrays: Arrays, metadata: dict[str, str]) -> None:
        """Keep arrays, whose computation is finished, and write them to the disk later."""
        self._keep(name, arrays)
        waiting = sum(map(_size, list(self._pending.values())))
        has_room = waiting + _size(arrays) <= MAX_PENDING
        if self._writer is not None and has_room and name not in self._paths:
            self._pending[name] = arrays
            self._writer.submit(self._write, name, arrays, metadata)

    def touch(self, name: str) -> None:
        """Count arrays as used now."""
        if name in self._memory:
            self._memory.move_to_end(name)
        path, now = self._paths.get(name), time.time_ns()
        if path is not None:
            with suppress(OSError):
                os.utime(path, ns=(now, now))

    def headers(self, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the names of files that begin with a prefix, with the metadata in the files."""
        for name, path in list(self._paths.items()):
            if name.startswith(prefix):
                try:
                    with safe_open(path, framework="numpy") as file:
                        yield name, file.metadata() or {}
                except (SafetensorError, OSError, ValueError) as error:
                    self._remove(name, error)

    def drop(self, name: str, reason: object = None) -> None:
        """Forget arrays; a file that is damaged for a reason is set aside."""
        found = self._memory.pop(name, None)
        if found is not None:
            self.nbytes -= _size(found)
        self._remove(name, reason)

    def close(self) -> None:
        """Write what waits to be written, and end the thread."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _keep(self, name: str, arrays: Arrays) -> None:
        if name not in self._memory:
            self.nbytes += _size(arrays)
        self._memory[name] = arrays
        self._memory.move_to_end(name)
        while self.nbytes > self.max_bytes and self._memory:
            _, oldest = self._memory.popitem(last=False)
            self.nbytes -= _size(oldest)

    def _open(self, folder: Path) -> None:
        """Find the files of earlier runs, and start to write new ones."""
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)  # prompts are private
            found = [(path.stat().st_mtime, path) for path in folder.iterdir() if path.is_file()]
        except OSError as error:
            logger.warning("prompts are kept in memory only: %s: %s", folder, explain(error))
            return
        for changed, path in found:
            if path.name.startswith(UNFINISHED):
                if time.time() - changed > 3600:  # some process has left it behind
                    path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                self._paths[path.name.partition(".")[0]] = path
        self._make_room()
        self._writer = ThreadPoolExecutor(1, "redrafter-prompts", end_streams_with_thread)

    def _read(self, name: str) -> Arrays | None:
        path = self._paths.get(name)
        if path is None:
            return None
        try:
            checksum = _checksum(path)
            if path.name != _file_name(name, checksum):
                raise ValueError(f"expected the checksum in the name, found {checksum:08x}")
            arrays = mx.load(str(path))
            assert isinstance(arrays, Mapping)
            mx.eval(arrays)
            return dict(arrays)
        except FileNotFoundError:  # another process has removed it
            self._remove(name)
        except (OSError, RuntimeError, ValueError) as error:
            self._remove(name, error)
        return None

    def _remove(self, name: str, reason: object = None) -> None:
        """Delete a file; one that is damaged for a reason is set aside."""
        path = self._paths.pop(name, None)
        if path is None:
            return
        with suppress(OSError):
            if reason is None:
                path.unlink(missing_ok=True)
                return
            logger.warning("set aside a damaged file of kept prompts: %s: %s", path, reason)
            folder = path.parent / "damaged"
            folder.mkdir(exist_ok=True)
            os.replace(path, folder / path.name)
            for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-4]:
                old.unlink()  # the newest ones stay for a look at them

    def _make_room(self) -> None:
        """Remove the files used least recently until the others fit."""
        files = []
        for name, path in list(self._paths.items()):
            with suppress(OSError):  # another process may have removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, name))
        excess = sum(size for _, size, _ in files) - self._max_disk_bytes
        for _, size, name in sorted(files):
            if excess <= 0:
                break
            self._remove(name)
            excess -= size

    def _write(self, name: str, arrays: Arrays, metadata: dict[str, str]) -> None:
        """Write a file; runs in the thread that writes."""
        try:
            if not self._is_full:
                self._write_file(name, arrays, metadata)
                self._make_room()
        except (OSError, RuntimeError) as error:
            self._is_full = True
            reason = explain(error) if isinstance(error, OSError) else first_line(error)
            logger.warning("prompts are not kept on the disk any more: %s", reason)
        finally:
            self._pending.pop(name, None)

    def _write_file(self, name: str, arrays: Arrays, metadata: dict[str, str]) -> None:
        assert self._folder is not None
        handle, unfinished = tempfile.mkstemp(prefix=UNFINISHED, suffix=SUFFIX, dir=self._folder)
        os.close(handle)
        try:
            mx.save_safetensors(unfinished, arrays, metadata)
            path = self._folder / _file_name(name, _checksum(Path(unfinished)))
            os.replace(unfinished, path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        self._paths[name] = path


def _file_name(name: str, checksum: int) -> str:
    return f"{name}.{checksum:08x}{SUFFIX}"


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found = zlib.crc32(block, found)
    return found


def _size(arrays: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in arrays.values())

"""A reader for the pickles of ``torch.save`` that can build tensors and plain containers only.

It is the unpickler of the standard library in its Python version, whose table of opcodes is reduced
to those of ``torch.save``, and which looks up and imports no name: it recognises the few names that
``torch.save`` needs as text and rejects all others. Opcodes that would change attributes or hash
containers are replaced. Each opcode does a bounded amount of work on existing objects, so time and
memory grow only with the length of the pickle. That is at most `MAX_PICKLE_BYTES`, whatever sizes
the pickle claims. Containers are never hashed, compared or printed: shared and nested containers
can be exponentially large.
"""

import math
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn

from mlx_redrafter.convert.stored import MAX_AXES, count_spanned
from mlx_redrafter.errors import CheckpointError, describe_error, quote

# Maximum size of a pickle in bytes; a drafter's has about 2 kB, a 70B model's about 100 kB.
MAX_PICKLE_BYTES = 2**20
# Maximum number of elements, offset or stride of a tensor, and of a number that is a key.
MAX_ELEMENTS = 2**48
# Maximum number of arguments of a call; a tensor has seven.
MAX_ARGUMENTS = 8

# Opcodes of ``torch.save`` (pickle protocols 2 to 4) that the standard library may interpret.
_HARMLESS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
    SHORT_BINUNICODE EMPTY_TUPLE EMPTY_DICT EMPTY_LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID
""".split()
# Errors of the standard library for malformed input.
_MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip

STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Storage(NamedTuple):
    """A run of ``size`` values outside the pickle, stored in the file under ``key``."""

    key: str
    dtype: str
    size: int


class PickledTensor(NamedTuple):
    """A strided view of a storage, checked to stay inside it; all numbers count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str


def read_pickle(stream: BinaryIO, name: str) -> object:
    """Read a pickle as nested dicts, lists, tuples, numbers, strings, None and `PickledTensor`.

    ``stream`` has at most `MAX_PICKLE_BYTES` in memory, which bounds time and memory. Raise
    `CheckpointError`, with ``name``, if it is damaged or needs more than tensors and containers.
    """
    try:
        return _Reader(stream, name).load()
    except _MALFORMED as error:
        raise CheckpointError(f"{name} is truncated or damaged: {describe_error(error)}") from error


class _Reader(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: BinaryIO, name: str):
        super().__init__(stream)
        self.name = name

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            return _FUNCTIONS[full]
        if module == "torch" and name in STORAGE_DTYPES:
            return _StorageType(STORAGE_DTYPES[name])
        self.reject(f"asks for {quote(full)}")

    def persistent_load(self, pid: Any) -> Storage:
        """Make a storage from its id: ("storage", type, key, device, elements)."""
        if type(pid) is not tuple or len(pid) != 5:
            raise ValueError("a storage has an unexpected description")
        tag, kind, key, _, size = pid
        known = type(tag) is str and tag == "storage" and type(kind) is _StorageType
        if not known or type(key) is not str:
            raise ValueError("a storage has an unexpected description")
        _check_count(size)
        return Storage(key, kind.dtype, size)

    def reject(self, action: str) -> NoReturn:
        raise CheckpointError(
            f"{self.name} {action}, which a file of tensors does not need; nothing was executed. "
            "Do not load it elsewhere, or, if it is your own, save the model's state_dict() alone"
        )

    def reduce(self) -> None:
        """Call a function that `find_class` has returned; calls with many arguments copy them."""
        arguments = self.stack.pop()
        if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise ValueError("a call has unexpected arguments")
        self.stack[-1] = self.stack[-1](*arguments)

    def build(self) -> None:
        """Drop the attributes of a state dict: torch's ``_metadata``, which is not needed."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(state) is not dict or type(target) is not dict:
            self.reject("sets attributes of something that is not a state dict")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._insert([key, value])

    def set_items(self) -> None:
        self._insert(self.pop_mark())

    def _insert(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("sets items of something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Python gives many large numbers the same hash, which makes a dict of them slow.
            if type(key) is not str:
                _check_count(key)
            if key in target:
                raise ValueError(f"a dict has the key {quote(str(key))} twice")
            target[key] = value

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}


_REPLACED = {
    "REDUCE": _Reader.reduce,
    "BUILD": _Reader.build,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
}


def _choose_step(opcode: pickletools.OpcodeInfo) -> Callable[[Any], None]:
    if opcode.name in _HARMLESS:
        return pickle._Unpickler.dispatch[ord(opcode.code)]
    action = f"uses the pickle opcode {opcode.name}"
    return _REPLACED.get(opcode.name, lambda reader: reader.reject(action))


_Reader.dispatch |= {ord(opcode.code): _choose_step(opcode) for opcode in pickletools.opcodes}


def _make_dict(*arguments: Any) -> dict[str, Any]:
    if arguments:
        raise ValueError("an OrderedDict has unexpected arguments")
    return {}


def _make_parameter(tensor: Any, *_: Any) -> PickledTensor:
    if type(tensor) is not PickledTensor:
        raise ValueError("a parameter holds no tensor")
    return tensor


def _make_tensor(*arguments: Any) -> PickledTensor:
    """Make a tensor from the arguments of ``_rebuild_tensor_v2``: storage, offset, shape, ..."""
    if len(arguments) not in (6, 7) or type(arguments[0]) is not Storage:
        raise ValueError("a tensor has an unexpected description")
    storage, offset, shape, strides = arguments[:4]
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise ValueError("a tensor's shape and strides do not match")
    if len(shape) > MAX_AXES:
        raise ValueError(f"a tensor has {len(shape)} axes, expected at most {MAX_AXES}")
    for count in (offset, *shape, *strides):
        _check_count(count)
    # The second condition rejects views that repeat values, whose size nothing in the file bounds.
    if offset + count_spanned(shape, strides) > storage.size or math.prod(shape) > storage.size:
        raise ValueError(
            f"a tensor of shape {list(shape)} exceeds its {storage.size} stored values"
        )
    return PickledTensor(storage, offset, shape, strides)


def _check_count(value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
        raise ValueError("a size is not a number in range")


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _make_dict,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_parameter": _make_parameter,
}

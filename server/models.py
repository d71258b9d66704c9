"""The models of a server: loaded at their first request, unloaded if others need the memory."""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checkpoints.memory_check import read_context_length, weight_bytes
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.measured import fingerprint
from mlx_redrafter.memory_sizes import read_total_memory
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.server.fields import shortened
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.prefix_store import PrefixStore
from mlx_redrafter.server.prefixes import Prefixes
from mlx_redrafter.server.refusals import Refusal

logger = logging.getLogger(__name__)

# Identities of models whose prompts are kept in memory only.
_numbers = count()
# Maximum number of unknown model names that the log shows.
MAX_LOGGED_NAMES = 100


class LoadedModel:
    """A model in memory, with what the worker needs for its texts.

    ``context`` is the maximum number of tokens of a prompt and its text. ``num_steps`` counts the
    forward passes after prompts, and ``num_accepted`` the drafts that they accepted. The worker
    does not know ``num_preparing`` of its requests yet.
    """

    def __init__(
        self,
        engine: Engine,
        options: GenerationOptions,
        store: PrefixStore,
        max_context: int = Limits.max_context,
    ):
        self.engine = engine
        self.context = min(max_context, engine.target.context_length or max_context)
        identity = identify(engine) if store.is_on_disk else ""
        self.prefixes = Prefixes(engine, store, options, identity or str(next(_numbers)))
        self.num_steps = self.num_accepted = self.num_preparing = 0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Keep the model in use until its request waits for the worker."""
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    @cached_property
    def scheduler(self) -> Scheduler:
        """Scheduler of texts in batches, for the worker's thread."""
        return self.engine.share()

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step has brought, read by a client or not; None before the first step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def nbytes(self) -> int:
        """Size of the weights of the target and the drafter, in bytes."""
        weights = map(named_parameters, self.engine.networks)
        return sum(one.nbytes for module in weights for one in module.values())


@dataclass(eq=False)
class Model:
    """A model that the server can load, with its drafter.

    Attributes:
        load: Function that loads it, which may run in any thread.
        folder: Folder of its files, if it is known without a download.
        name_drafter: Function that names the drafter of the loaded model, for clients.
        keep_alive: Seconds without requests after which it is unloaded.
        last_used: Time of its newest request, in seconds of `time.monotonic`.
    """

    name: str
    load: Callable[[], Engine]
    folder: Path | None = None
    name_drafter: Callable[[], str | None] = lambda: None
    loaded: LoadedModel | None = None
    keep_alive: float = math.inf
    max_context: int = Limits.max_context
    last_used: float = 0.0

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a prompt and its text; None if that is not known yet."""
        if self.loaded is not None:
            return self.loaded.context
        with suppress(CheckpointError, OSError):
            if self.folder is not None:
                return min(self.max_context, read_context_length(self.folder) or self.max_context)
        return None

    @property
    def modified(self) -> float:
        """Time at which its files were written, of `time.time`; 0 if they are not known."""
        return self.folder.stat().st_mtime if self.folder and self.folder.is_dir() else 0.0

    def describe(self) -> dict[str, Any]:
        """Return the model's entry in the list of models, with OpenAI's fields and Anthropic's."""
        found, context = self.loaded, self.context
        return {
            "id": self.name,
            "object": "model",
            "type": "model",
            "display_name": self.name,
            "created": int(self.modified),
            "created_at": datetime.fromtimestamp(self.modified, UTC).isoformat(),
            "lifecycle": "active",
            "owned_by": "mlx_redrafter",
            "state": "not_loaded" if found is None else "loaded",
            "has_chat": None if found is None else found.engine.tokenizer.has_chat_template,
            "has_tools": None if found is None else found.engine.tokenizer.has_tool_calling,
            "context_length": context,
            "max_input_tokens": context and context - 1,
            "drafter": None if found is None else self._find_drafter(found.engine.proposer),
            "tokens_per_step": None if found is None else found.tokens_per_step,
        }

    def _find_drafter(self, proposer: Proposer | None) -> str | None:
        """Return the name of the drafter in use: lookup replaces one that cannot be loaded."""
        if proposer is None:
            return "none"
        return "lookup" if isinstance(proposer, Lookup) else self.name_drafter()

    def estimate_bytes(self) -> int:
        """Return the size of the weights, by their files unless they are loaded; 0 without any."""
        if self.loaded is not None:
            return self.loaded.nbytes
        with suppress(CheckpointError, OSError):
            if self.folder is not None:
                return weight_bytes(self.folder)
        return 0


@dataclass
class Models:
    """The models by name; all methods are for the event loop's thread.

    Attributes:
        models: The models. The first one answers requests without a name or with an unknown one.
        options: Options of texts for requests that leave them out.
        is_busy: Function that returns whether texts of a loaded model wait or run.
        is_strict: Whether an unknown name is an error.
        folder: Folder of the prompts kept for the next start; None for none.
    """

    models: Sequence[Model]
    options: GenerationOptions
    limits: Limits
    is_busy: Callable[[LoadedModel], bool] = lambda model: False
    is_strict: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        limits = self.limits
        self.store = PrefixStore(limits.prompt_cache_bytes, self.folder, limits.prompt_disk_bytes)
        self._loading = asyncio.Lock()
        self._unknown: set[str] = set()
        for model in self.models:
            self._reset(model)
            model.max_context = limits.max_context

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def find(self, name: str | None) -> Model:
        """Find a model by its name; refuse an unknown one if names are strict."""
        first = self.models[0]
        for model in self.models:
            if name in (model.name, f"{model.name}:latest"):  # Ollama's clients add the tag
                return model
        if name in (None, "", "default_model"):  # the last one is a name for any model at mlx-lm
            return first
        if self.is_strict:
            names = ", ".join(repr(model.name) for model in self.models)
            raise Refusal(
                f"model must be one of {names}, got {shortened(name)!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        if name not in self._unknown and len(self._unknown) < MAX_LOGGED_NAMES:
            self._unknown.add(name)
            logger.info("%r answers requests for the model %r", first.name, shortened(name))
        return first

    async def open(self, name: str | None) -> tuple[Model, LoadedModel]:
        """Find a model, and load it unless it is in memory; raise `Refusal` if either fails."""
        model = self.find(name)
        model.last_used = time.monotonic()
        loaded = model.loaded
        if loaded is None:
            async with self._loading:
                loaded = model.loaded
                if loaded is None:
                    await self._make_room(model)
                    loaded = await self._load(model)  # a client may unload it at any moment
                    await self._make_room(model)  # its size is known only now
        model.last_used = time.monotonic()
        return model, loaded

    def unload(self, model: Model) -> None:
        """Forget a model in memory; its running texts go on to their ends."""
        if model.loaded is not None:
            logger.info("unloaded %s", model.name)
        model.loaded = None
        self._reset(model)  # a client has chosen for this time in memory only
        _free_memory()

    def is_used(self, loaded: LoadedModel) -> bool:
        """Return whether a request for a model is prepared, waits or runs."""
        return loaded.num_preparing > 0 or self.is_busy(loaded)

    def _reset(self, model: Model) -> None:
        model.keep_alive = self.limits.keep_alive or math.inf

    async def unload_idle(self) -> None:
        """Unload models that nobody has used for their time to stay, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for model in self.models:
                if model.loaded is None or self._loading.locked():
                    continue
                if self.is_used(model.loaded):
                    model.last_used = now
                elif now - model.last_used > model.keep_alive:
                    self.unload(model)

    def load(self, model: Model) -> LoadedModel:
        """Load a model, in any thread; raise `RedrafterError` if it cannot be loaded."""
        start = time.monotonic()
        loaded = LoadedModel(model.load(), self.options, self.store, model.max_context)
        model.loaded = loaded
        logger.info("loaded %s in %.1f s", model.name, time.monotonic() - start)
        return loaded

    async def _load(self, model: Model) -> LoadedModel:
        try:
            return await asyncio.to_thread(self.load, model)
        except RedrafterError as error:
            logger.error("cannot load %s: %s", model.name, error)
            raise Refusal(
                f"the model {model.name!r} cannot be loaded; see the server's log",
                "model",
                status=503,
                code="model_not_loaded",
            ) from error

    async def _make_room(self, wanted: Model) -> None:
        """Unload the models used least recently until there is memory for another one."""
        # By default, a quarter of the memory is for caches.
        limit = self.limits.max_model_bytes or _device_bytes() * 3 // 4
        by_age = sorted(self.models, key=lambda model: model.last_used)
        others = [model for model in by_age if model.loaded is not None and model is not wanted]
        while others and sum(one.estimate_bytes() for one in (wanted, *others)) > limit:
            oldest = others.pop(0)
            left = oldest.loaded
            self.unload(oldest)
            while left is not None and self.is_used(left):  # its running texts end first
                await asyncio.sleep(0.02)
            left = None
            _free_memory()


def identify(engine: Engine) -> str:
    """Identify all on which K/V entries depend: weights, config, tokenizer, device and versions.

    Blocks until MLX has added up the bits of all weights.
    """
    weights = map(named_parameters, engine.networks)
    config = _settings(engine.target.model)
    sums = [_sum_of_bits(tensor) for module in weights for tensor in module.values()]
    words = sorted(engine.tokenizer.get_vocab().items())
    kinds = type(engine.target.model).__module__, type(engine.proposer).__name__
    return fingerprint((sums, config, kinds, words, version("mlx-lm")), engine.networks)


def _settings(model: nn.Module) -> list[tuple[Any, ...]]:
    """List the values from a config that layers keep, such as bases of rotary embeddings.

    Some keep an array that they have computed from these, whose name has an underscore.
    """
    values = [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, (int, float, str))
    ]
    leaves: Any = tree_flatten(model)
    arrays = [(name, one) for name, one in leaves if isinstance(one, mx.array)]
    hidden = [(name, _sum_of_bits(one)) for name, one in arrays if "._" in f".{name}"]
    return [*values, *hidden]


def _sum_of_bits(tensor: mx.array) -> int:
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    total: Any = mx.sum(tensor.flatten().view(kinds.get(tensor.itemsize, mx.uint32))).item()
    return int(total)


def _free_memory() -> None:
    """Free what nobody uses now; a reply that has ended refers to itself and to its model."""
    gc.collect()
    mx.clear_cache()


def _device_bytes() -> int:
    """Return the size of the device's memory in bytes, or of the machine's if MLX does not say."""
    found = mx.device_info()
    size = found.get("max_recommended_working_set_size") or found.get("memory_size")
    return int(size or read_total_memory() or 0)

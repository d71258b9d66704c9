"""What a step of every shape costs on this machine, timed once and remembered.

Axes: W beam width, L beam length, N tree nodes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlx_redrafter.beam import expand
from mlx_redrafter.checkpoint import write_atomically
from mlx_redrafter.config import TreeShape
from mlx_redrafter.controller import CANDIDATES
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.drafter_io import named_parameters
from mlx_redrafter.target import Target
from mlx_redrafter.tree import TokenTree, ancestor_mask, select_top_n
from mlx_redrafter.version import __version__

logger = logging.getLogger(__name__)

# Tokens in the cache while timing; what a longer context adds, it adds to every shape.
CONTEXT = 128
# Rounds over everything that is timed; the fastest one counts, as the others were disturbed.
ROUNDS = 4

Seconds = dict[TreeShape | None, float]


def step_costs(target: Target, drafter: Drafter) -> Seconds:
    """Seconds per step by shape, of plain decoding under None; timed unless a file knows them.

    Times take a few seconds and are kept per model, dtype, drafter, device and MLX version in the
    user's cache folder.
    """
    path = cache_folder() / f"{_fingerprint(target, drafter)}.json"
    keys = {_key(shape): shape for shape in (None, *CANDIDATES)}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {shape: float(stored[key]) for key, shape in keys.items()}
    except (OSError, ValueError, KeyError, TypeError):
        seconds = time_steps(target, drafter)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({key: seconds[shape] for key, shape in keys.items()})
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        logger.warning("step times are not kept for the next run: %s", error)
    return seconds


def time_steps(target: Target, drafter: Drafter) -> Seconds:
    """Time the verifies and drafts of all candidate shapes. Waits for the device."""
    cache = target.new_cache()
    prompt = mx.zeros((CONTEXT,), dtype=mx.int32)
    hidden = target.prefill(prompt, cache, CONTEXT, lambda done, total: None).hiddens[0]
    root = mx.zeros((1,), dtype=mx.int32)
    mx.eval(hidden, root)

    def advance() -> None:
        mx.eval(mx.argmax(target.advance(root, cache).logits, axis=-1))
        cache.settle(CONTEXT)

    def verify(shape: TreeShape) -> None:
        mx.eval(mx.argmax(target.verify(_widest(shape), cache).logits, axis=-1))

    def draft(shape: TreeShape) -> None:
        expansion = expand(drafter, target.embed, hidden, root, shape)
        mx.eval(select_top_n(expansion, root, shape).arrays)

    work: list[Callable[[], None]] = [advance]
    work += [partial(verify, shape) for shape in CANDIDATES]
    work += [partial(draft, shape) for shape in CANDIDATES]
    best = [math.inf] * len(work)
    for _ in range(ROUNDS):
        best = [min(seconds, _time(call)) for seconds, call in zip(best, work, strict=True)]
    plain, verifies, drafts = best[0], best[1 : 1 + len(CANDIDATES)], best[1 + len(CANDIDATES) :]
    steps = zip(CANDIDATES, verifies, drafts, strict=True)
    return {None: plain} | {shape: verify + draft for shape, verify, draft in steps}


def cache_folder() -> Path:
    """Where step times are kept: ``mlx-redrafter`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-redrafter"


def _widest(shape: TreeShape) -> TokenTree:
    """A tree of the shape's size whose drafts all hang below the root."""
    size = shape.tree_nodes or shape.max_nodes
    nodes = mx.arange(size, dtype=mx.int32)
    parents, depths = mx.zeros_like(nodes), mx.minimum(nodes, 1)
    return TokenTree(nodes, parents, depths, ancestor_mask(parents, 1), size, size, max_depth=1)


def _time(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _fingerprint(target: Target, drafter: Drafter) -> str:
    """Changes with whatever changes the times: weights' shapes and dtypes, device, version."""
    modules = (target.model, drafter)
    tensors = [
        (name, tensor.shape, str(tensor.dtype))
        for module in modules
        for name, tensor in named_parameters(module).items()
    ]
    device = (str(mx.default_device()), mx.device_info().get("device_name"), platform.processor())
    known = repr((tensors, device, version("mlx"), __version__, CANDIDATES))
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def _key(shape: TreeShape | None) -> str:
    if shape is None:
        return "plain"
    return f"{shape.beam_width}x{shape.beam_length}:{shape.tree_nodes}"

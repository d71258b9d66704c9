"""Host time of building the pass that verifies a tree, compiled or not, and of a drafted step.

Models are random and narrow. CPU time of the main thread is measured, so other work on the machine
counts little. The CPU back end makes norms, rotations and attention of many operations, a GPU's has
one for each. `gpu_like` makes graphs as large as a GPU's, which give other numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_redrafter import device_read
from mlx_redrafter.bench.lab.contexts import bushy_tree
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.prefill import prefill
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import Inputs, Lane, Noises, step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.profiling import blank_cache
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.compiled_pass import USES, CompiledPasses
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
HYBRID: Mapping[str, Any] = {
    **COMMON,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# Configs, by model type and number of layers.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama, 32 layers": {**COMMON, "model_type": "llama", "num_hidden_layers": 32},
    "qwen3_moe, 48 layers": {
        **COMMON,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
    },
    "qwen3_5, 64 layers": {"model_type": "qwen3_5", "text_config": HYBRID},
}
# Tokens before the trees, fewer than a bucket with all trees.
LENGTH = 64
# Passes that are not measured.
WARM_UP = 3


class HostTime(NamedTuple):
    """CPU time of the main thread for one pass, in seconds.

    Attributes:
        least: Minimum of building the graph.
        median: Median of building it.
        commit: Minimum of committing a path.
        dispatch: Median of dispatching the graph.
        first: Time of the pass that compiles; None without compiling.
    """

    least: float
    median: float
    commit: float
    dispatch: float
    first: float | None


def measure(config: Mapping[str, Any], nodes: int, compiled: bool, repeats: int) -> HostTime:
    """Measure passes over a tree that a path of two nodes follows each time."""
    model = make_model("a random model", config)
    mx.eval(model.parameters())
    target, tree = Target(model), bushy_tree(nodes)
    target.compiled = CompiledPasses(compiled)
    cache = blank_cache(target, LENGTH)
    seconds = []
    for _ in range(repeats + WARM_UP + (USES if compiled else 0)):
        start = time.thread_time()
        outputs = target.verify(tree, cache)
        built = time.thread_time()
        mx.async_eval(outputs.logits, outputs.hidden_states)
        dispatched = time.thread_time()
        mx.eval(outputs.logits)
        waited = time.thread_time()
        cache.commit([0, 2])
        seconds.append((built - start, time.thread_time() - waited, dispatched - built))
        if cache.length > LENGTH + 100:
            cache.trim_to(LENGTH)
    first = seconds[USES - 1][0] if compiled else None
    build, commit, dispatch = np.array(seconds[-repeats:]).T
    medians = (float(np.median(one)) for one in (build, dispatch))
    return HostTime(build.min(), next(medians), commit.min(), next(medians), first)


class StepTime(NamedTuple):
    """Work of the host in a drafted step.

    Attributes:
        waiting: Median CPU time of the main thread from the end of drafting to the dispatch of the
            verify, in seconds; 0 if the device need not wait, as the host reads nothing meanwhile.
        dispatch: The same from the dispatch of the drafts to that of the verify.
        reads: Mean number of reads from the device.
    """

    waiting: float
    dispatch: float
    reads: float


def measure_steps(
    config: Mapping[str, Any], plan: DraftPlan, compiled: bool, steps: int
) -> StepTime:
    """Measure steps of a text with random drafts, in the order in which they take place."""
    model, size = make_model("a random model", config), COMMON["hidden_size"]
    drafter = Drafter(DrafterConfig(COMMON["vocab_size"], size, size, 1, rnn=True))
    mx.eval(model.parameters(), drafter.parameters())
    target, prompt = Target(model), list(range(LENGTH))
    target.compiled = CompiledPasses(compiled)
    text = SequenceDecoder(
        target,
        target.caches.new(),
        KeyedSampler(SamplingParams(), target.vocab_size),
        Request(prompt),
        drafter.open(target, prompt, True, []),
        FixedPolicy(plan),
    )
    found, reads, wait = [], 0, device_read.waiting

    class Timed(Lane):
        """Notes times and reads at the end of drafting, and times around the verify."""

        drafted, before, is_ahead, begun, dispatched = 0.0, 0, False, 0.0, 0.0

        def look_ahead(self, sequence: SequenceDecoder) -> bool:
            self.drafted, self.before = time.thread_time(), reads
            return super().look_ahead(sequence)

        def verify(self, inputs: Inputs, noises: Noises) -> dict[SequenceDecoder, Pass]:
            is_tree = any(isinstance(one, TokenTree) for one in inputs.values())
            self.is_ahead = is_tree and reads == self.before
            self.begun = time.thread_time()
            passes = super().verify(inputs, noises)
            self.dispatched = time.thread_time()
            return passes

    lane = Timed()

    def count() -> AbstractContextManager[None]:
        nonlocal reads
        reads += 1
        return wait()

    for _ in prefill([text]):
        pass
    with patch.object(device_read, "waiting", count), target.compiled.warming_up():
        for _ in range(steps + WARM_UP):
            start = reads
            step(lane, [text])
            text.take()
            waiting = 0.0 if lane.is_ahead else lane.dispatched - lane.begun
            found.append((waiting, lane.dispatched - lane.drafted, reads - start))
    waits, dispatch, num_reads = np.array(found[WARM_UP:]).T
    return StepTime(float(np.median(waits)), float(np.median(dispatch)), num_reads.mean())


@contextmanager
def gpu_like() -> Iterator[None]:
    """Make one operation of each norm, rotation and attention, with other numbers."""

    def norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return mx.stop_gradient(x) if weight is None else mx.depends([x], [weight])[0]

    def rotate(x: mx.array, dims: int, **options: Any) -> mx.array:
        return mx.stop_gradient(x)

    def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        mask = options.get("mask")
        return mx.depends([q], [k, v, mask] if isinstance(mask, mx.array) else [k, v])[0]

    with patch.multiple(mx.fast, rms_norm=norm, rope=rotate, scaled_dot_product_attention=attend):
        yield

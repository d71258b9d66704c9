"""Memory that drafting needs, each number with its bound.

The model is a random Llama: memory does not depend on the values. The drafter's weights are counted
separately; all else must be small compared with stock mlx-lm's plain decoding.

Axes: N nodes of the tree, L beam length, V vocabulary.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.bench.lab.contexts import COMMON, PREFILL_STEP, bushy_tree, gpu_like
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.decoding.delivery import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.stored_costs import blank_cache
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.caches.tree_cache import parts_of
from mlx_redrafter.target.compiled_pass import CompiledPasses
from mlx_redrafter.target.few_shapes import BUCKET
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.target import Target

# Tokens to decode.
NUM_TOKENS = 64
# Allowed peak of the prefill, relative to mlx-lm's.
PREFILL_RATIO = 1.05
# Allowed peak of decoding, relative to mlx-lm's.
PEAK_RATIO = 1.10
# Bytes of the K/V buffers that compiled passes must update in place.
LARGE = 2**30
# Allowed memory of such a pass, relative to the buffers.
IN_PLACE_RATIO = 0.01


@dataclass(frozen=True)
class Finding:
    """A number found by a measurement, and its maximum, in the same unit."""

    name: str
    found: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the number is within its bound."""
        return self.found <= self.bound


@dataclass(frozen=True)
class Peaks:
    """Peak memory of one request, in bytes, the weights of target and drafter included.

    Attributes:
        prefill: Peak up to the first token.
        decoding: Peak after the first token.
        rows: K/V entries allocated per layer, after each token.
    """

    prefill: int
    decoding: int
    rows: list[int]


def random_pair() -> tuple[nn.Module, Drafter]:
    """Make a Llama of about 40M parameters and a drafter for it, with random float32 weights."""
    vocab_size = 32000
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=512,
            num_hidden_layers=8,
            intermediate_size=1408,
            num_attention_heads=8,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=vocab_size,
            max_position_embeddings=2**17,
        )
    )
    drafter = Drafter(
        DrafterConfig(vocab_size, hidden_size=512, exit_dim=512, num_draft_layers=1, rnn=True)
    )
    mx.eval(model.parameters(), drafter.parameters())
    return model, drafter


def measure_memory(
    model: nn.Module,
    drafter: Drafter,
    plan: DraftPlan,
    prompt_tokens: int = 4096,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Finding]:
    """Measure everything that has a bound."""
    target = Target(model)
    prompt = [i % target.vocab_size for i in range(prompt_tokens)]
    stock = _peaks(lambda: _stock_tokens(model, prompt))
    on_progress(1, 3)
    drafted = _peaks(lambda: _drafted_tokens(target, drafter, plan, prompt))
    on_progress(2, 3)
    prefill = drafted.prefill - num_bytes(model) - num_bytes(drafter)
    logits = prompt_tokens * target.vocab_size * mx.float32.size
    name = "prefill beyond the weights; bound: logits of the whole prompt"
    findings = [Finding(name, prefill / 1e6, logits / 1e6, "MB")]
    findings += _compare(stock, drafted, drafter, plan)
    findings.append(update_large_buffers([[0, 2], [0, 1, 3], [0]]))
    on_progress(3, 3)
    return findings


def update_large_buffers(paths: Sequence[Sequence[int]]) -> Finding:
    """Run compiled passes over a tree that these paths follow, with `LARGE` K/V buffers.

    Attention is left out, because the CPU keeps its scores of all entries.
    """
    config = {**COMMON, "model_type": "llama", "num_hidden_layers": 4, "head_dim": 512}
    model = make_model("a random model", config)
    target, tree = Target(model), bushy_tree(8)
    target.compiled = CompiledPasses(are_used=True)
    entry = 2 * 4 * 2 * 512 * mx.float32.size  # keys and values, layers, heads, their size
    with gpu_like(), target.compiled.warming_up():
        cache = blank_cache(target, LARGE // entry - BUCKET)
        for number in range(6):
            mx.eval(target.verify(tree, cache).logits)
            cache.commit(paths[number % len(paths)])
            if number == 2:
                mx.clear_cache()
                held = mx.get_active_memory()
                mx.reset_peak_memory()
    assert target.compiled.passes
    assert allocated_rows(cache.stock) == LARGE // entry
    peak = mx.get_peak_memory() - held
    name = f"memory of a pass with {format_bytes(LARGE)} of K/V buffers"
    return Finding(name, peak / 1e6, IN_PLACE_RATIO * LARGE / 1e6, "MB")


def _compare(stock: Peaks, drafted: Peaks, drafter: Drafter, plan: DraftPlan) -> list[Finding]:
    extra = plan.num_nodes + plan.shape.length
    block = KVCache.step
    rows = [
        (found, -(-(plain + extra) // block) * block)
        for plain, found in zip(stock.rows, drafted.rows, strict=True)
    ]
    found, bound = max(rows, key=lambda pair: pair[0] - pair[1])
    # All peaks, stock's too, include the weights of both models.
    peaks = (
        ("peak of the prefill", PREFILL_RATIO, stock.prefill, drafted.prefill, 0),
        ("peak of decoding", PEAK_RATIO, stock.decoding, drafted.decoding, 0),
        ("peak of decoding", PEAK_RATIO, stock.decoding, drafted.decoding, num_bytes(drafter)),
    )
    findings = []
    for what, ratio, plain, own, weights in peaks:
        name = f"{what} against stock's" + (", without the drafter's weights" if weights else "")
        most = ratio * (plain - weights)
        findings.append(Finding(name, (own - weights) / 1e6, most / 1e6, "MB"))
    return [*findings, Finding("K/V rows allocated per layer", found, bound, "rows")]


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights."""
    return sum(tensor.nbytes for tensor in named_parameters(module).values())


def _peaks(decode: Callable[[], tuple[Sequence[KVCache], Iterator[object]]]) -> Peaks:
    """Peaks of a request that yields at least NUM_TOKENS tokens."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    caches, tokens = decode()
    next(tokens)
    prefill = mx.get_peak_memory()
    mx.synchronize(generation_stream)
    mx.clear_cache()
    mx.reset_peak_memory()
    rows = []
    for _ in range(NUM_TOKENS):
        next(tokens)
        rows.append(allocated_rows(caches))
    return Peaks(prefill, mx.get_peak_memory(), rows)


def allocated_rows(caches: Sequence[KVCache]) -> int:
    """K/V rows of each layer's buffers, of the layers that have some."""
    buffers = [getattr(cache, "keys", None) for cache in parts_of(caches)]
    return max((keys.shape[2] for keys in buffers if keys is not None), default=0)


def _stock_tokens(
    model: nn.Module, prompt: Sequence[int]
) -> tuple[Sequence[KVCache], Iterator[object]]:
    caches = make_prompt_cache(model)
    tokens = generate_step(
        mx.array(list(prompt)),
        model,
        max_tokens=-1,
        prompt_cache=caches,
        prefill_step_size=PREFILL_STEP,
    )
    return caches, tokens


def _drafted_tokens(
    target: Target, drafter: Drafter, plan: DraftPlan, prompt: Sequence[int]
) -> tuple[Sequence[KVCache], Iterator[object]]:
    caches = make_prompt_cache(target.model)
    chooser = KeyedSampler(SamplingParams(), target.vocab_size)
    request = Request(list(prompt), prefill_step_size=PREFILL_STEP)
    drafting = drafter.open(target, prompt, True, [])
    cache = target.caches.new(caches)
    return caches, decode(
        SequenceDecoder(target, cache, chooser, request, drafting, FixedPolicy(plan))
    )

"""Cost of steps as the context grows, for layers that keep all tokens, windows or states.

The models are random: times and memory do not depend on the values.

Axes: N tokens of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.bench.lab.contexts import bushy_tree
from mlx_redrafter.bench.lab.rounds import Job, take_turns
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, timed
from mlx_redrafter.bench.turns import part_of
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Rounds that are not recorded.
WARM_UP = 2
# Length of the windows, in tokens.
WINDOW = 512
# Names of the passes in tables.
KINDS = ONE, STOCK, CHAIN, TREE = "one token", "mlx-lm's call", "chain", "tree"

COMMON: Mapping[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2**17,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "output_multiplier": 1.0,
    "layer_rope_theta": [10000.0] * 4,
    "model_type": "muse_glimmer",
}
# Configs of models that differ in what their layers keep, by that.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "all tokens": {**COMMON, "layer_types": ["full_attention"] * 4},
    "windows": {**COMMON, "layer_types": ["sliding_attention"] * 4},
    "windows and all tokens": {
        **COMMON,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "states": {  # Mamba-2
        **COMMON,
        "model_type": "mamba2",
        "num_heads": 8,
        "state_size": 64,
        "conv_kernel": 4,
        "n_groups": 1,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "states and all tokens": {  # gated delta nets
        **COMMON,
        "model_type": "olmo_hybrid",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
    },
}


@dataclass(frozen=True)
class CacheCost:
    """Costs of steps after a context.

    Attributes:
        model: Name of the model, by what its layers keep.
        context: Tokens before the steps.
        seconds: Time of one token, and of N: in mlx-lm's own call, as a chain and as a tree.
        ratios: Median times relative to one token's.
        peak: Peak memory of a step with the tree beyond the weights, its cache included, in bytes.
    """

    model: str
    context: int
    seconds: dict[str, MedianEstimate]
    ratios: dict[str, float]
    peak: int


def measure_caches(
    configs: Mapping[str, Mapping[str, Any]],
    contexts: Sequence[int],
    num_tokens: int,
    rounds: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[CacheCost]:
    """Measure steps of random models, in turns those of a model.

    Args:
        configs: Configs of the models, by what their layers keep.
        contexts: Tokens before the steps.
        num_tokens: Tokens of a forward pass, N, at least 2.
        rounds: Samples of each number.
        on_progress: Callback for the rounds done and their number.

    Raises:
        CheckpointError: mlx-lm cannot make a model.
        UnsupportedTargetError: A model cannot be decoded exactly.
    """
    chain = TokenTree.of(range(num_tokens), [max(node - 1, 0) for node in range(num_tokens)])
    trees = {ONE: bushy_tree(1), CHAIN: chain, TREE: bushy_tree(num_tokens)}
    found: list[CacheCost] = []
    turns = WARM_UP + rounds
    for number, (name, config) in enumerate(configs.items()):
        model = make_model(name, config)
        model.eval()
        mx.eval(model.parameters())
        target = Target(model)
        jobs: dict[str, Job] = {}
        for context in contexts:
            jobs |= {f"{kind} {context}": _job(target, context, trees[kind]) for kind in trees}
            jobs[f"{STOCK} {context}"] = _stock_job(target, context, trees[TREE].tokens)
        part = part_of(on_progress, number * turns, len(configs) * turns)
        samples = take_turns(jobs, rounds, WARM_UP, on_progress=part)
        jobs.clear()  # and with them their caches
        for context in contexts:
            seconds = {kind: estimate(samples[f"{kind} {context}"]) for kind in KINDS}
            ratios = {kind: value.median / seconds[ONE].median for kind, value in seconds.items()}
            peak = _peak(target, context, trees[TREE])
            found.append(CacheCost(name, context, seconds, ratios, peak))
    return found


def _job(target: Target, context: int, tree: TokenTree) -> Job:
    """Return a job that times a pass over a tree; the context grows by one token each time."""
    cache = target.blank_cache(context)

    def job() -> float:
        with mx.stream(generation_stream):
            if tree.size == 1:
                return timed(lambda: mx.eval(*target.advance(tree.tokens, cache)))
            seconds = timed(lambda: mx.eval(*target.verify(tree, cache)))
            cache.commit([0])
        return seconds

    return job


def _stock_job(target: Target, context: int, tokens: mx.array) -> Job:
    """Return a job that times a call of the stock model with its own caches."""
    layers = target.blank_cache(context).stock

    def job() -> float:
        with mx.stream(generation_stream):
            return timed(lambda: mx.eval(target.model(tokens[None], cache=layers)))

    return job


def _peak(target: Target, context: int, tree: TokenTree) -> int:
    mx.clear_cache()
    held = mx.get_active_memory()
    job = _job(target, context, tree)
    job()  # the first tree makes buffers
    mx.clear_cache()
    mx.reset_peak_memory()
    job()
    return mx.get_peak_memory() - held

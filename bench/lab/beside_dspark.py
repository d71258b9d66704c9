"""The same DSpark head in mlx-dspark and here, in one process, greedy, in turns.

    python -m mlx_redrafter.bench.lab.beside_dspark MODEL HEAD PROMPTS --texts 8 --tokens 96

HEAD is a drafter that ``train --head dspark`` has made. It is written once more as DeepSpec
publishes such heads, and mlx-dspark loads that. Both use the same weights of MODEL. Every text must
be the one of mlx-lm. mlx-dspark 0.20.3 has to be installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate

from mlx_redrafter import Engine, load
from mlx_redrafter.bench.prompts import read_prompts, select_prompts
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.proposers.block.network import BlockNetwork

# Nodes of the tree that is compared with the chain of the block.
TREE_NODES = 16
# Tokens of the warm-up of every method.
WARM_UP = 24


class Text(NamedTuple):
    """A text with its seconds, those of the prompt included, and its number of verify passes."""

    tokens: list[int]
    seconds: float
    passes: int

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.tokens)


Method = Callable[[list[int], int], Text]


def publish(network: BlockNetwork, folder: Path) -> None:
    """Write a head as DeepSpec does: layers are named by their outputs."""
    config = network.config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names = (*sizes, "vocab_size", "num_hidden_layers", "rms_norm_eps", "rope_theta")
    values = {name: getattr(config, name) for name in (*names, "max_position_embeddings")}
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    values |= {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "head_dim": head_dim,
        "attention_bias": config.attention_bias,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [number - 1 for number in config.captured_layers],
        "num_target_layers": config.num_target_layers,
        "markov_rank": config.rank,
        "markov_head_type": config.link,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
    }
    (folder / "config.json").write_text(json.dumps(values))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(named_parameters(network)))


def stock_method(model: Any, tokenizer: Any) -> Method:
    """Return plain decoding by mlx-lm."""

    def decode(prompt: list[int], count: int) -> Text:
        start = time.perf_counter()
        tokens = [one.token for one in stream_generate(model, tokenizer, prompt, max_tokens=count)]
        return Text(tokens, time.perf_counter() - start, len(tokens))

    return decode


def own_method(engine: Engine, plan: DraftPlan | None) -> Method:
    """Return decoding by this package: a fixed plan, or the default."""
    options: dict[str, Any] = {} if plan is None else dict(plan.options)

    def decode(prompt: list[int], count: int) -> Text:
        start = time.perf_counter()
        found = list(engine.stream(prompt, max_tokens=count, **options))
        passes = round(len(found) / (found[-1].tokens_per_step or 1.0))
        return Text([one.token for one in found], time.perf_counter() - start, passes)

    return decode


def rival_method(target: Any, drafter: Any, tokenizer: Any, **options: Any) -> Method:
    """Return decoding by mlx-dspark."""
    generate = importlib.import_module("mlx_dspark.generate").speculative_generate

    def decode(prompt: list[int], count: int) -> Text:
        start = time.perf_counter()
        found = generate(
            target, tokenizer, drafter, prompt_ids=prompt, max_new_tokens=count, **options
        )
        return Text(list(found.token_ids), time.perf_counter() - start, found.num_rounds)

    return decode


def make_methods(
    model: Any, tokenizer: Any, drafter: BlockNetwork, folder: Path
) -> dict[str, Method]:
    """Return all methods by name, mlx-lm's first."""
    publish(drafter, folder)
    head, _ = importlib.import_module("mlx_dspark.load").load_drafter(str(folder), quantize=False)
    target = importlib.import_module("mlx_dspark.target").Target(model, tokenizer)
    whole: dict[str, Any] = {"max_draft_tokens": None}
    block = drafter.config.num_drafts
    chain, tree = (1, block + 1, block + 1), (4, block + 1, TREE_NODES)
    return {
        "mlx-lm": stock_method(model, tokenizer),
        "mlx-dspark, block": rival_method(target, head, tokenizer, lookup_drafts=False, **whole),
        "mlx-dspark, block and lookups": rival_method(target, head, tokenizer, **whole),
        "mlx-dspark, 2 drafts": rival_method(target, head, tokenizer),
        "chain of the block": own_method(Engine(model, tokenizer, drafter), DraftPlan.of(*chain)),
        "tree": own_method(Engine(model, tokenizer, drafter), DraftPlan.of(*tree)),
        "default": own_method(Engine(model, tokenizer, drafter), None),
    }


def measure(methods: dict[str, Method], prompts: list[list[int]], count: int) -> None:
    """Decode every prompt with every method, in turns, and print a table."""
    names = list(methods)
    texts: dict[str, list[Text]] = {name: [] for name in names}
    for name in names:
        methods[name](prompts[0], WARM_UP)
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            texts[name].append(methods[name](prompt, count))
    print("| method | texts equal | tokens/pass | speed of mlx-lm | least | most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        pairs = list(zip(texts[names[0]], texts[name], strict=True))
        speeds = [stock.seconds_per_token / one.seconds_per_token for stock, one in pairs]
        kept = sum(len(one.tokens) for one in texts[name]) / sum(one.passes for one in texts[name])
        # mlx-dspark ends with the pass that reaches the limit.
        equal = sum(one.tokens[: len(stock.tokens)] == stock.tokens for stock, one in pairs)
        spread = f"{np.median(speeds):.2f} | {min(speeds):.2f} | {max(speeds):.2f}"
        print(f"| {name} | {equal} of {len(pairs)} | {kept:.2f} | {spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    model, tokenizer, drafter = load(options.model, drafter=options.head)
    if not isinstance(drafter, BlockNetwork):
        raise RedrafterError(f"expected a DSpark head in {options.head}, found another drafter")
    prompts = [
        tokenizer.encode(one.text)
        for one in select_prompts(read_prompts(options.prompts), options.texts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        measure(make_methods(model, tokenizer, drafter, Path(folder)), prompts, options.tokens)


if __name__ == "__main__":
    main()

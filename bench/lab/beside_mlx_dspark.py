"""mlx-dspark beside this package: the same model, DSpark drafter and prompts, greedy.

    pip install mlx-dspark 'mlx[cpu]'
    python -m mlx_redrafter.bench.lab.beside_mlx_dspark MODEL DRAFTER PROMPTS --texts 12 --tokens 64

DRAFTER is a folder that `redrafter-mlx train --head dspark` has written. Its tensors have the names
of DeepSpec's, so that a config makes it one of mlx-dspark's. All methods decode a text before the
next one begins, each time in another order. Prints a table. Needs a quiet machine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mlx_redrafter  # before MLX, for its faster BLAS

# isort: split
import mlx.core as mx
from mlx_lm import stream_generate

from mlx_redrafter.bench.prompts import read_prompts, select_prompts
from mlx_redrafter.checkpoint_files import named_parameters, write_checkpoint
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork

STOCK = "mlx-lm"
# Tokens of the warm-up of every method.
WARM_UP = 24
# Fields of a block drafter's config that DeepSpec's config has under the same names.
SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "rms_norm_eps", "rope_theta", "max_position_embeddings", "num_hidden_layers", "block_size",
    "mask_token_id", "num_target_layers",
)  # fmt: skip


class Text(NamedTuple):
    """A text: its tokens, the steps and the seconds after the first token."""

    tokens: list[int]
    steps: int
    seconds: float


Decode = Callable[[list[int], int], Text]


def export(drafter: object, folder: Path) -> BlockNetwork:
    """Write a DSpark drafter as DeepSpec publishes them, in float32, and return it.

    Raise ConfigError for other drafters, and for other variants of DSpark.
    """
    if not isinstance(drafter, BlockNetwork) or not _is_exported_whole(drafter.config):
        raise ConfigError(
            "expected a drafter that `redrafter-mlx train --head dspark` has written, found "
            "another kind or variant; train one"
        )
    config = drafter.config
    stored = {name: getattr(config, name) for name in SAME}
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    stored |= {"model_type": "qwen3", "head_dim": head_dim}
    # DeepSpec numbers the layer whose output is read.
    stored |= {"target_layer_ids": [layer - 1 for layer in config.captured_layers]}
    stored |= {"markov_rank": config.rank, "confidence_head_with_markov": True}
    tensors = {name: one.astype(mx.float32) for name, one in named_parameters(drafter).items()}
    write_checkpoint(folder, stored, tensors)
    return drafter


def _is_exported_whole(config: BlockConfig) -> bool:
    """Return whether a block has nothing but what the exported config says."""
    has_mask = any(config.causal) or any(config.windows)
    is_reduced = config.draft_vocab_size is not None
    return config.link == "vanilla" and not (is_reduced or config.first_slot or has_mask)


def make_methods(model: Path, drafter: Path, folder: Path) -> tuple[Any, dict[str, Decode]]:
    """Return the tokenizer, and the methods by name."""
    theirs = import_module("mlx_dspark")
    loaded, tokenizer, found = mlx_redrafter.load(str(model), drafter=str(drafter))
    block = export(found, folder)
    target, _ = theirs.load_target(str(model), require_tap=True)
    network, _ = theirs.load_drafter(str(folder), quantize=False)

    def stock(prompt: list[int], count: int) -> Text:
        return _timed(stream_generate(loaded, tokenizer, prompt, max_tokens=count))

    def ours(**options: Any) -> Decode:
        engine = mlx_redrafter.Engine(loaded, tokenizer, block)
        return lambda prompt, count: _timed(engine.stream(prompt, max_tokens=count, **options))

    def other(**options: Any) -> Decode:
        def decode(prompt: list[int], count: int) -> Text:
            found = theirs.speculative_generate(
                target, tokenizer, network, prompt_ids=prompt, max_new_tokens=count, **options
            )
            return Text(found.token_ids, found.num_rounds, found.decode_seconds)

        return decode

    return tokenizer, {
        STOCK: stock,
        "mlx-dspark, whole blocks": other(max_draft_tokens=None, lookup_drafts=False),
        "mlx-dspark, two drafts": other(max_draft_tokens=2, lookup_drafts=False),
        "mlx-dspark, default": other(),
        "ours, whole blocks": ours(beam_width=1, beam_length=block.max_length),
        "ours, two drafts": ours(beam_width=1, beam_length=3),
        "ours, default": ours(),
    }


def _timed(responses: Any) -> Text:
    times, tokens, last = [], [], None
    for last in responses:
        times.append(time.perf_counter())
        tokens.append(last.token)
    steps = getattr(last, "steps", len(tokens) - 1)  # of stock mlx-lm, one per token
    return Text(tokens, steps, times[-1] - times[0])


def compare(methods: dict[str, Decode], prompts: list[list[int]], count: int) -> None:
    """Decode all prompts by all methods, and print the table."""
    for decode in methods.values():
        decode(prompts[0], WARM_UP)
    names = list(methods)
    texts: dict[str, list[Text]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            texts[name].append(methods[name](prompt, count))
        print(f"{number + 1} of {len(prompts)} texts", flush=True)
    print(
        "| method | tokens/step | speed, median | 25% to 75% | equal texts |\n|---|---|---|---|---|"
    )
    for name, found in texts.items():
        pairs = list(zip(found, texts[STOCK], strict=True))
        speeds = [_rate(one) / _rate(stock) for one, stock in pairs]
        low, median, high = np.percentile(speeds, (25, 50, 75))
        yielded = sum(len(one.tokens) - 1 for one in found) / sum(one.steps for one in found)
        equal = sum(one.tokens[:count] == stock.tokens for one, stock in pairs)
        longer = sum(len(one.tokens) > count for one in found)
        note = f", {longer} longer than asked" if longer else ""
        print(
            f"| {name} | {yielded:.2f} | {median:.2f} | {low:.2f} to {high:.2f} | "
            f"{equal} of {len(pairs)}{note} |"
        )


def _rate(text: Text) -> float:
    return (len(text.tokens) - 1) / text.seconds


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, methods = make_methods(given.model, given.drafter, Path(folder))
        chosen = select_prompts(read_prompts(given.prompts), given.texts)
        prompts = [tokenizer.encode(one.text, add_special_tokens=False) for one in chosen]
        compare(methods, prompts, given.tokens)


if __name__ == "__main__":
    main()

"""A small Llama as a draft model for a target, from the teacher cache of the target's drafters.

    python draft_model.py --target target-float32 --cache drafter/cache --out draft-model

It learns what heads learn, in one pass: the target's most probable next tokens at every token.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs

from mlx_redrafter.checkpoint_files import named_parameters, read_config, write_checkpoint
from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.teacher_cache import MANIFEST, TeacherCache
from mlx_redrafter.training.trainer import make_schedule

# Consecutive tokens that attend to each other, even if they belong to several texts.
STRETCH = 512
# Tokens per optimiser step.
BATCH_TOKENS = 2048
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    config = shape(read_config(a.target), a.hidden, a.layers)
    identity = json.loads((a.cache / MANIFEST).read_text())
    del identity["format"]
    a.out.mkdir(parents=True)  # before the long work, which an old folder would lose
    model = new_model(config, a.seed)
    train(model, TeacherCache(a.cache, identity), a.lr, a.seed)
    write(model, config, a.target, a.out)


def shape(target: dict[str, object], hidden: int, layers: int) -> dict[str, object]:
    """Make a Llama with the target's vocabulary and context."""
    return {
        **target,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": -(-hidden * 8 // 3 // 32) * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def new_model(config: dict[str, object], seed: int) -> Model:
    """Make a random model: normal weights of 0.02, smaller at the end of a block, as in GPT-2."""
    model = Model(ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    depth = len(model.layers)
    weights = []
    for name, value in named_parameters(model).items():
        if value.ndim == 2:
            is_end = "o_proj" in name or "down_proj" in name
            scale = 0.02 / np.sqrt(2 * depth) if is_end else 0.02
            value = mx.array(rng.normal(0, scale, value.shape).astype(np.float32))
        weights.append((name, value))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def train(model: Model, cache: TeacherCache, peak: float, seed: int) -> None:
    options = BatchOptions(2, BATCH_TOKENS, seed, STRETCH)
    order = BatchOrder(cache, "train", options)
    total = order.steps_per_epoch
    rate = make_schedule(peak, total)
    adam = optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=0.0, bias_correction=True)

    def loss(part: TrainingBatch, counts: mx.array) -> mx.array:
        # Row t of a batch holds the token after position t and what the target says after it.
        logits = model(part.tokens[None, :, 0])[0].astype(mx.float32)
        return draft_loss(logits[:, None], part, counts, "soft")

    gradient = nn.value_and_grad(model, loss)
    begun, found = time.monotonic(), 0.0
    for step in range(total):
        batch = order.batch(step)
        counts = mx.sum(batch.weights, axis=0)
        parts = None
        num_parts = batch.tokens.shape[0] // STRETCH
        for number in range(num_parts):
            value, part = gradient(batch.part(number, num_parts), counts)
            parts = part if parts is None else tree_map(mx.add, parts, part)
            mx.eval(value, parts)
            found += value.item()
        parts, _ = optim.clip_grad_norm(parts, 1.0)
        adam.update(model, parts)
        mx.eval(model.parameters(), adam.state)
        if (step + 1) % 50 == 0 or step + 1 == total:
            steps = (step % 50) + 1
            seconds = time.monotonic() - begun
            print(f"step {step + 1} of {total}: loss {found / steps:.3f}, {seconds:.0f} s")
            found = 0.0


def write(model: Model, config: dict[str, object], target: Path, out: Path) -> None:
    """Write the folder of a model, in float16, with the target's tokenizer."""
    for name in TOKENIZER_FILES:
        if (target / name).exists():
            shutil.copy(target / name, out / name)
    weights = {n: v.astype(mx.float16) for n, v in named_parameters(model).items()}
    write_checkpoint(out, config, weights)


if __name__ == "__main__":
    main()

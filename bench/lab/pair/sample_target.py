"""The ten unselected samples of the target's card, by stock mlx-lm.

    python sample_target.py --model DIR --prompts prompts.jsonl

Seeds 0 to 9, each with one of every four held-out prompts as `corpus.py heldout` writes them.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_sampler

SAMPLES = 10
STRIDE = 4  # of five prompts per book and eight books, one from almost every book


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=120)
    a = parser.parse_args()
    model, tokenizer = load(a.model)
    prompts = [json.loads(line) for line in a.prompts.read_text(encoding="utf-8").splitlines()]
    for seed, prompt in enumerate(prompts[::STRIDE][:SAMPLES]):
        mx.random.seed(seed)
        sampler = make_sampler(temp=a.temp)
        text = generate(
            model, tokenizer, prompt["prompt"], max_tokens=a.max_tokens, sampler=sampler
        )
        print(
            f"**Seed {seed}**, *{prompt['category']}*\n\n> {prompt['prompt']}\n\n{text.rstrip()}\n"
        )


if __name__ == "__main__":
    main()

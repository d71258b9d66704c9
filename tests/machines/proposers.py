"""A script for ranks: texts with every kind of proposer, batches, cancelled texts, prompt caches.

python -m tests.machines.proposers FOLDER [slow] [KIND ...]

FOLDER is one that `store` has filled. Prints a JSON line with the result of each kind, all of them
by default. With "slow" the other ranks wait 3 ms before each pass.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter import Engine, SpeculateAhead, load, load_drafter
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.machines.following import Follower
from tests.e2e.test_every_kind import KINDS, PROMPTS, SHAPES, VOCAB_SIZE
from tests.helpers import mimo
from tests.helpers.models import fast_tokenizer
from tests.helpers.mtp import family_config, module_tensors
from tests.models.tiny_models import build

TARGET = "target"
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "eos_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
# A kind for another family of targets, which is tried alone.
MTP = "MTP"
# The folder of its target.
MTP_TARGET = "MTP target"
# Kinds that are not tried with the others; one exists for tests only.
LEFT_OUT = {MTP, "toy"}
# Entries in 8 bits from a token of the first prompt's text on.
QUANTISED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}
# Tokens of a text.
TOKENS = 24


def store(folder: Path) -> None:
    """Write the target and a drafter of every kind, and another target with an MTP module."""
    other = {**family_config("deepseek_v3"), "vocab_size": VOCAB_SIZE}
    mimo.write(folder / MTP, module_tensors(other), other)
    for name, config in ((TARGET, CONFIG), (MTP_TARGET, other)):
        mimo.write(folder / name, named_parameters(build(copy.deepcopy(config))), config)
        fast_tokenizer()._tokenizer.save_pretrained(folder / name)
    for name, write in KINDS.items():
        if name not in LEFT_OUT:
            (folder / name).mkdir()
            write(folder / name)


def texts_of(engine: Engine, **options: Any) -> list[list[int]]:
    """Token ids of texts, greedy and sampled."""
    return [
        [one.token for one in engine.stream(prompt, max_tokens=TOKENS, temp=t, seed=3, **options)]
        for prompt in PROMPTS
        for t in (0.0, 1.0)
    ]


def batch_of(engine: Engine, **options: Any) -> list[list[int]]:
    """Token ids of texts that are written two at a time."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, response in engine.stream_batch(PROMPTS, batch_size=2, **options):
        found[number].append(response.token)
    return found


def try_kind(engine: Engine, expected: list[list[int]]) -> dict[str, Any]:
    """Compare texts with drafts, alone and together, with plain ones."""
    found = {f"equal {shape or ''}": texts_of(engine, **shape) == expected for shape in SHAPES}
    options: dict[str, Any] = {"max_tokens": TOKENS, "temp": 0.0, **SHAPES[1]}
    found["batch"] = batch_of(engine, **options) == expected[::2]
    stream = engine.stream(PROMPTS[0], **options)
    begun = [next(stream).token for _ in range(5)]
    stream.cancel()
    begun += [one.token for one in stream]
    found["cancelled"] = begun == expected[0][: len(begun)] and len(begun) < TOKENS
    found["after it"] = [one.token for one in engine.stream(PROMPTS[0], **options)] == expected[0]
    return found


def try_caches(engine: Engine, other: Engine, **options: Any) -> dict[str, Any]:
    """Continue a text in its cache, and refuse a cache that these ranks have not filled."""
    found: list[Any] = []
    options = {"max_tokens": 9, "temp": 0, **options}
    for one in (engine, other):
        cache = one.new_prompt_cache()
        first = [r.token for r in one.stream(PROMPTS[0], prompt_cache=cache, **options)]
        second = one.stream([5, 6, 7], prompt_cache=cache, **options)
        found.append((first, [r.token for r in second], batch_of(one, **options)))
    try:
        engine.stream([5], prompt_cache=cache)
        refused = False
    except ConfigError as error:
        refused = "prompt_cache" in str(error)
    return {"kind": "prompt cache", "equal": found[0] == found[1], "refused": refused}


def main(folder: Path, *words: str) -> None:
    """Decode on rank 0."""
    group = mx.distributed.init()
    if "slow" in words and group.rank():
        stock = Follower.obey
        Follower.obey = lambda self, frame: (time.sleep(3e-3), stock(self, frame))[1]  # type: ignore
    target = folder / (MTP_TARGET if MTP in words else TARGET)
    model, tokenizer, _ = load(target, group=group)
    whole = Engine(*load(target)[:2], None)
    plain = Engine(model, tokenizer, None)
    expected = texts_of(plain)
    results = [{"kind": "plain", "equal": expected == texts_of(whole)}, try_caches(plain, whole)]
    for name in [one for one in words if one in KINDS] or KINDS.keys() - LEFT_OUT:
        drafter = name if name == "lookup" else load_drafter(folder / name)
        engine = Engine(model, tokenizer, drafter)
        results.append({"kind": name, **try_kind(engine, expected)})
        if target.name == TARGET:
            results.append(
                {**try_caches(engine, whole, **QUANTISED, **SHAPES[1]), "kind": "kv_bits"}
            )
    if target.name == TARGET:
        ahead = SpeculateAhead(load_drafter(folder / "recurrent"), 4)
        found = texts_of(Engine(model, tokenizer, ahead), **SHAPES[1])
        results.append({"kind": "ahead", "equal": found == expected})
    for one in results:
        sys.stdout.write(f"{json.dumps(one)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

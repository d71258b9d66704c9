"""A script for ranks: texts with every kind of proposer, batches, cancelled texts, prompt caches.

python -m tests.machines.proposers FOLDER [slow] [untimed] [tokens=16] [KIND ...]

Without ``mlx.launch`` it fills the folder. With it, it prints a JSON line with the checks of each
kind, all of them but MTP by default. With "slow" the last rank waits 3 ms before each pass. With
"untimed" the policy gets step times that nobody has measured.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Engine, SpeculateAhead, load, load_drafter
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.machines.following import Follower
from tests.e2e.test_every_kind import KINDS, PROMPTS, SHAPES, VOCAB_SIZE, write_heads
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.calls import at_call
from tests.helpers.costs import fix_costs
from tests.helpers.models import fast_tokenizer
from tests.helpers.mtp import family_config, module_tensors, write
from tests.models.tiny_models import build

TARGET = "target"
# Heads and widths divide by two, three and four ranks.
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 32,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "eos_token_id": 0, "rope_theta": 100.0,
    "tie_word_embeddings": False,
}  # fmt: skip
# A kind for another family of targets, which is tried alone.
MTP = "MTP"
# Folder of its target.
MTP_TARGET = "MTP target"
# Config of its target.
MTP_CONFIG = {
    **family_config("deepseek_v3"), "vocab_size": VOCAB_SIZE, "num_attention_heads": 12,
    "num_key_value_heads": 12, "intermediate_size": 48, "moe_intermediate_size": 48,
}  # fmt: skip
# Drafts while the target computes, around the recurrent kind.
AHEAD = "recurrent, drafting ahead"
# Names of DSpark's Markov heads in the tests' block drafters.
MARKOV = "vanilla", "gated", "recurrent"
# Kinds to try with the policy's drafts, too, which times every shape first.
TIMED = "recurrent", "draft model", "lookup", "EAGLE-3"
# Kinds to try in chats.
THOROUGH = *TIMED, MTP
# Words of a call that name no kind.
WORDS = "slow", "untimed"
# Entries in 8 bits from a token of the first prompt's text on.
QUANTISED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}


def _make_block(link: str) -> Any:
    return random_block(block_config(VOCAB_SIZE, 32, **LINKS[link]))


# What makes the network of each kind; "toy" exists for tests only.
TRIED = {name: make for name, make in KINDS.items() if name != "toy"}
TRIED["DFlash"] = partial(_make_block, "DFlash")
TRIED |= {f"DSpark ({link})": partial(_make_block, link) for link in MARKOV}


def store(folder: Path) -> None:
    """Write the target and a drafter of every kind, and another target with an MTP module."""
    write(folder / MTP, module_tensors(MTP_CONFIG), MTP_CONFIG)
    for name, config in ((TARGET, CONFIG), (MTP_TARGET, MTP_CONFIG)):
        write(folder / name, named_parameters(build(copy.deepcopy(config))), config)
        fast_tokenizer()._tokenizer.save_pretrained(folder / name)
    for name, make in TRIED.items():
        (folder / name).mkdir()
        write_heads(folder / name, make)


class Writer:
    """An engine for texts of ``length`` tokens, which are counted."""

    def __init__(self, length: int, *given: Any):
        self.engine = Engine(*given)
        self.length = length
        self.tokens = 0

    def texts(self, temp: float, **options: Any) -> list[list[int]]:
        """Token ids of texts that are written one after the other."""
        options = {"max_tokens": self.length, "temp": temp, "seed": 3, **options}
        return [self.ids(self.engine.stream(prompt, **options)) for prompt in PROMPTS]

    def batch(self, temp: float, **options: Any) -> list[list[int]]:
        """Token ids of the same texts, two at a time."""
        found: list[list[int]] = [[] for _ in PROMPTS]
        options = {"max_tokens": self.length, "temp": temp, "seed": 3, **options}
        for number, response in self.engine.stream_batch(PROMPTS, batch_size=2, **options):
            found[number] += self.ids([response])
        return found

    def chat(self, **options: Any) -> tuple[Any, ...]:
        """Two texts in one cache, and a batch."""
        options = {"max_tokens": 9, "temp": 0.0, **options}
        cache = self.engine.new_prompt_cache()
        first = self.ids(self.engine.stream(PROMPTS[0], prompt_cache=cache, **options))
        second = self.ids(self.engine.stream([5, 6, 7], prompt_cache=cache, **options))
        return first, second, self.batch(**options)

    def cancelled(self, **options: Any) -> list[int]:
        """Token ids of a text that is cancelled after five."""
        stream = self.engine.stream(PROMPTS[0], max_tokens=self.length, temp=0.0, **options)
        begun = self.ids(next(stream) for _ in range(5))
        stream.cancel()
        return begun + self.ids(stream)

    def ids(self, responses: Iterable[Any]) -> list[int]:
        found = [one.token for one in responses]
        self.tokens += len(found)
        return found


def try_kind(
    name: str, writer: Writer, plain: dict[float, list[list[int]]], whole: Writer
) -> dict[str, bool]:
    """Compare texts with drafts, alone and together, with plain ones."""
    found = dict.fromkeys(("greedy", "sampled"), True)
    for shape in SHAPES if name in TIMED else SHAPES[1:]:
        found["greedy"] &= writer.texts(0.0, **shape) == plain[0.0]
        found["sampled"] &= writer.texts(1.0, **shape) == plain[1.0]
    found["batch"] = all(writer.batch(t, **SHAPES[2]) == plain[t] for t in plain)
    if name not in THOROUGH:
        return found
    begun = writer.cancelled(**SHAPES[2])
    found["cancelled"] = 0 < len(begun) < writer.length and begun == plain[0.0][0][: len(begun)]
    found["chat"] = writer.chat(**SHAPES[1]) == whole.chat()
    if whole.engine.target.num_layers == CONFIG["num_hidden_layers"]:
        found["kv_bits"] = writer.chat(**QUANTISED, **SHAPES[1]) == whole.chat(**QUANTISED)
    return found


def refuses_foreign_caches(plain: Writer, whole: Writer) -> bool:
    """Return whether a cache that these ranks have not filled is refused."""
    cache = whole.engine.new_prompt_cache()
    whole.ids(whole.engine.stream(PROMPTS[0], prompt_cache=cache, max_tokens=3))
    try:
        plain.engine.stream([5], prompt_cache=cache)
    except ConfigError as error:
        return "prompt_cache" in str(error)
    return False


def main(folder: Path, *words: str) -> None:
    """Decode on rank 0."""
    group, patch = mx.distributed.init(), pytest.MonkeyPatch()
    if "slow" in words and group.rank() == group.size() - 1:
        at_call(patch, Follower, "obey", lambda *_: time.sleep(3e-3))
    if "untimed" in words:
        fix_costs(patch)
    target = folder / (MTP_TARGET if MTP in words else TARGET)
    model, tokenizer, _ = load(target, group=group)
    length = int(next((one[7:] for one in words if one.startswith("tokens=")), 16))
    whole = Writer(length, *load(target)[:2], None)
    writer = Writer(length, model, tokenizer, None)
    expected = {temp: writer.texts(temp) for temp in (0.0, 1.0)}
    checks = {
        "one process": all(whole.texts(temp) == texts for temp, texts in expected.items()),
        "batch": all(writer.batch(temp) == texts for temp, texts in expected.items()),
        "foreign caches": refuses_foreign_caches(writer, whole),
    }
    _print("no drafts", checks, writer.tokens)
    for name in [one for one in words if one not in WORDS and "=" not in one] or [*TRIED, AHEAD]:
        drafter: Any = "lookup"
        if name == AHEAD:
            drafter = SpeculateAhead(load_drafter(folder / "recurrent"), 4)
        elif name != "lookup":
            drafter = load_drafter(folder / name)
        writer = Writer(length, model, tokenizer, drafter)
        found = try_kind(name, writer, expected, whole)
        label = f"{name}, the last rank slowed" if "slow" in words else name
        _print(label, found, writer.tokens)


def _print(what: str, checks: dict[str, bool], tokens: int) -> None:
    row = {"what": what, "dtype": "float32", "checks": checks, "tokens": tokens}
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    (main if "MLX_RANK" in os.environ else store)(Path(sys.argv[1]), *sys.argv[2:])

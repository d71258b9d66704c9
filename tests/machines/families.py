"""A script for ranks: texts of tiny models that are split, with drafts and without, as JSON lines.

python -m tests.machines.families FAMILY ... [tokens=24] [dtype=bfloat16]
"""

import json
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.kernels.variant import dtype_name
from mlx_redrafter.machines.following import Follower
from mlx_redrafter.machines.leading import lead, target_of
from mlx_redrafter.machines.line import Do
from mlx_redrafter.machines.meeting import Machines, meet
from mlx_redrafter.machines.splitting import split
from mlx_redrafter.target.caches.stored_cache import has_states
from mlx_redrafter.target.target import Target
from tests.models.tiny_models import build, main_rope, tiny_config
from tests.models.trees import PROMPT, DraftsOnDevice, sequence_of, step_together

# Families that mlx-lm splits and trees work on; it cannot split prism_hadamard_qwen35.
FAMILIES = (
    "deepseek_v2", "deepseek_v3", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "iquestloopcoder", "kimi_k25", "llama", "longcat_flash", "minimax", "ministral3", "mistral4",
    "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open", "step3p5",
)  # fmt: skip
# Ends of the names of widths that ranks split.
WIDTHS = "intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "expert_dim"
# Prompts of a batch, which differ in length.
PROMPTS = (PROMPT, PROMPT[:3], PROMPT[::-1] * 2)


def _divide(config: dict[str, Any], size: int) -> None:
    """Change heads and widths to such as divide by 3 or 4; those of the tests divide by 2."""
    for name, value in config.items():
        if isinstance(value, dict):
            _divide(value, size)
        elif size > 2 and name.endswith(("heads", "groups")):
            is_key = name.endswith(("key_value_heads", "key_heads", "groups"))
            config[name] = size if is_key else 2 * size
        elif size == 3 and name.endswith(WIDTHS):
            config[name] = 96


def model_of(family: str, size: int, dtype: mx.Dtype) -> nn.Module:
    """Make a tiny model of a family whose heads divide by ``size``, the same on every rank."""
    config = tiny_config(family, main_rope(family))
    _divide(config, size)
    model = build(config)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def write(
    target: Target, prompt: list[int], count: int, temp: float, right: Any = None, chunk: int = 5
) -> Any:
    """Tokens of a text, and its steps; with drafts around the text ``right`` if it is given."""
    drafts = right and DraftsOnDevice([*prompt, *right])
    params = SamplingParams(temp=temp, seed=7)
    options = {"max_tokens": count, "prefill_step_size": chunk}
    sequence = sequence_of(target, prompt, drafts, params, **options)
    return [token.id for token in decode(sequence)], sequence.delivery.stats.steps


def write_kept(target: Target, prompt: list[int], right: list[int]) -> list[int]:
    """Tokens of a greedy text whose cache is filled with copies of another text's."""
    half, first = len(right) // 2, target.caches.new()
    begun = sequence_of(target, prompt, cache=first, max_tokens=half)
    tokens = [token.id for token in decode(begun)]
    entries, states = target.caches.copy_entries(first.stock, 0, first.length), {}
    if has_states(first.stock):
        states = target.caches.copy_states(first.stock)
    stock, length = target.caches.stock(), first.length
    del first
    target.caches.fill(stock, [(entries, length)], states, length, None)
    del entries, states  # the other ranks drop their copies, too
    cache, num_left = target.caches.new(stock), len(right) - half
    rest = sequence_of(target, [*prompt, *tokens][length:], cache=cache, max_tokens=num_left)
    return tokens + [token.id for token in decode(rest)]


def write_batch(target: Target, texts: list[list[int]], count: int, temp: float) -> Any:
    """Tokens of texts that share their passes, the last with drafts; the second is cancelled."""
    scheduler, sequences = Scheduler(target), []
    for number, (prompt, right) in enumerate(zip(PROMPTS, texts, strict=True)):
        drafts = DraftsOnDevice([*prompt, *right]) if number else None
        params = SamplingParams(temp=temp, seed=7)
        sequences.append(sequence_of(target, prompt, drafts, params, max_tokens=count))
    scheduler.begin(sequences)
    found: list[list[int]] = [[] for _ in sequences]
    while not all(one.is_closed for one in sequences):
        for sequence, tokens in step_together(scheduler):
            number = sequences.index(sequence)
            found[number] += tokens
            if number == 1 and len(found[1]) > count // 2:
                sequence.cancel()
    return found


def lead_one(machines: Machines, family: str, count: int, dtype: mx.Dtype) -> dict[str, Any]:
    """Compare the texts of one process and of all ranks, plain and drafted."""
    size = machines.group.size()
    whole = Target(model_of(family, size, dtype))
    model = model_of(family, size, dtype)
    split(model, machines.group)
    lead(machines, model)
    target = target_of(model)
    found = dict.fromkeys(("drafted", "batch", "kept"), True)
    if dtype == mx.float32:  # in 16 bits the split model's sums may break ties otherwise
        found["one process"] = True
    tokens = 0
    for temp in (0.0, 1.0):
        texts = [write(target, prompt, count, temp)[0] for prompt in PROMPTS]
        for prompt, text in zip(PROMPTS, texts, strict=True):
            # One process writes either text of exaone_moe's third prompt, depending on the chunks:
            # its router's best two groups of experts differ by 2e-7 there.
            if "one process" in found:
                found["one process"] &= any(
                    write(whole, prompt, count, temp, chunk=chunk)[0] == text for chunk in (5, 1)
                )
            drafted, steps = write(target, prompt, count, temp, text)
            found["drafted"] &= drafted == text and steps < count
            tokens += len(text) + len(drafted)
            if temp == 0.0:
                found["kept"] &= write_kept(target, prompt, text) == text
        together = write_batch(target, texts, count, temp)
        ends = [texts[0], texts[1][: len(together[1])], texts[2]]
        found["batch"] &= together == ends and count // 2 < len(together[1]) < count
        tokens += sum(map(len, together))
    return {"what": family, "dtype": dtype_name(dtype), "checks": found, "tokens": tokens}


def main(arguments: list[str]) -> None:
    """Run the families, one after the other, on this rank."""
    options = dict(one.split("=") for one in arguments if "=" in one)
    dtype = getattr(mx, options.get("dtype", "float32"))
    machines = meet(mx.distributed.init())
    for family in [one for one in arguments if "=" not in one] or FAMILIES:
        if machines.leads:
            found = lead_one(machines, family, int(options.get("tokens", 24)), dtype)
            sys.stdout.write(f"{json.dumps(found)}\n")
            sys.stdout.flush()
            for line in machines.lines:
                line.say(Do.SPLIT)
        else:
            model = model_of(family, machines.group.size(), dtype)
            split(model, machines.group)
            follower = Follower(model, machines)
            while (frame := machines.lines[0].receive()).do not in (Do.SPLIT, Do.END):
                follower.obey(frame)


if __name__ == "__main__":
    main(sys.argv[1:])

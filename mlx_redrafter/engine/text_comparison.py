"""Comparison of drafted text with the target's own, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_redrafter.device_read import to_floats
from mlx_redrafter.engine.engine import AnyDrafter
from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.engine.responses import GenerationResponse
from mlx_redrafter.machines.leading import target_of

# Options that both decoders have.
QUANTISATION = "kv_bits", "kv_group_size", "quantized_kv_start"


@dataclass(frozen=True)
class Difference:
    """The first token that is not the target's own.

    Attributes:
        position: Index in the generated text, from 0.
        expected: The target's own token, None if its text had ended.
        found: The token of drafted decoding, None if its text had ended.
        gap: Difference of the two best log-probabilities of the target there, in nats; a gap near
            the rounding error of the dtype means a tie.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float


@dataclass(frozen=True)
class Comparison:
    """Drafted decoding against plain decoding of ``num_tokens``, the stop token included."""

    num_tokens: int
    tokens_per_step: float | None
    difference: Difference | None


def compare_decoding(
    model: nn.Module,
    tokenizer: Any,
    drafter: AnyDrafter,
    prompt: Sequence[int],
    max_tokens: int,
    on_token: Callable[[], None] = lambda: None,
    **options: Any,
) -> Comparison:
    """Decode a prompt with drafts and plainly, and compare the tokens.

    At temperature 0, plain decoding is stock ``mlx_lm.generate_step``. Above 0, it is that of this
    package, as mlx-lm has other random numbers, and so it is with ``kv_bits`` on several machines,
    as mlx-lm quantises the cache of one machine only. With a temperature the options must have a
    seed. ``on_token`` is called for every token of both texts.
    """

    def decode(drafter: AnyDrafter) -> Iterator[GenerationResponse]:
        for response in stream_generate(
            model, tokenizer, prompt, drafter=drafter, max_tokens=max_tokens, **options
        ):
            on_token()
            yield response

    drafted = list(decode(drafter))
    plain, target = [], target_of(model)
    if options.get("temp") or (target.devices and options.get("kv_bits") is not None):
        plain = [(response.token, response.logprobs) for response in decode(None)]
    else:
        shared = {name: options[name] for name in QUANTISATION if name in options}
        for token, log_probs in generate_step(
            mx.array(list(prompt)), target.stock_model, max_tokens=max_tokens, **shared
        ):
            on_token()
            plain.append((int(token), log_probs))
            if token in tokenizer.eos_token_ids:
                break
    return Comparison(
        num_tokens=len(plain),
        tokens_per_step=drafted[-1].tokens_per_step,
        difference=_first_difference(plain, [response.token for response in drafted]),
    )


def num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens with which two texts begin alike."""
    return sum(takewhile(bool, map(eq, one, other)))


def _first_difference(
    plain: Sequence[tuple[int, mx.array]], drafted: Sequence[int]
) -> Difference | None:
    expected = [token for token, _ in plain]
    if expected == list(drafted):
        return None
    position = num_same(expected, drafted)
    log_probs = plain[min(position, len(plain) - 1)][1].astype(mx.float32)
    second, first = to_floats(mx.sort(log_probs)[-2:])
    return Difference(
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=drafted[position] if position < len(drafted) else None,
        gap=first - second,
    )

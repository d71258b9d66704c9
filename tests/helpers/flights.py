"""Forward passes as proposers see them."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass, Results
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.target import Target


def flight_of(
    path: Sequence[int],
    num_accepted: int,
    bonus: int,
    length: int,
    states: mx.array | None = None,
    hidden_state: mx.array | None = None,
) -> Pass:
    """A verified chain of tokens, root first, of whose drafts some were accepted.

    The target's own token ``bonus`` follows them; ``length`` tokens are committed before the root.
    """
    outcome = [bonus, num_accepted, *range(len(path)), *path]
    results = Results(
        packed=mx.array(outcome, dtype=mx.int32),
        roots=mx.array([bonus], dtype=mx.int32),
        hidden_states=mx.zeros((1, 1)) if hidden_state is None else hidden_state[None],
        log_probs=mx.zeros((len(path), 1)),
        states=states,
        paths=mx.arange(len(path), dtype=mx.int32),
    )
    return Pass(results, 0, len(path), length=length)


def drafts_after_any_steps(
    network: Any, target: Target, width: int, plans: Sequence[DraftPlan], rng: random.Random
) -> Iterator[tuple[list[int], mx.array, Any]]:
    """Drafts after a prompt in chunks, and accepted, rejected and skipped drafts.

    With each tree comes the text so far, and the random states after its tokens but the last.
    """

    def draw(count: int) -> tuple[list[int], mx.array]:
        key = mx.random.key(rng.randrange(10**6))
        states = 2 * mx.random.normal((count, width), key=key)
        return [rng.randrange(target.vocab_size) for _ in range(count)], states

    text, states = draw(7)
    drafting = network.open(target, text, True, [])
    for start in (0, 4):  # the last token of the prompt apart
        drafting.reader.read(states[start : min(start + 4, 6)])
    flight = flight_of(text[-1:], 0, 9, len(text) - 1, states[-1:])
    text.append(9)
    for step in range(6):
        if step % 3 == 1:
            drafting.skip(flight)
        else:
            yield text, states, drafting.propose(flight, plans[step % len(plans)], None)
        path, nodes = draw(rng.randrange(1, 5))
        num_accepted = rng.randrange(len(path))
        flight = flight_of([text[-1], *path[1:]], num_accepted, 11, len(text) - 1, nodes)
        text += [*path[1 : num_accepted + 1], 11]
        states = mx.concatenate([states, nodes[: num_accepted + 1]])

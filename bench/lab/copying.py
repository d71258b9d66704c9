"""Texts that repeat their prompt: a document and source code, written out again with edits.

Small models do not copy. So a logits processor makes every decoding method write the edited text.
The steps cost as much as without it, and given the processor the text is the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx_lm

from mlx_redrafter.bench.lab.cases import ENGLISH, SOURCE_CODE
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import AUTO, PLAIN, STOCK, Arm, CommonSettings, EncodedPrompt
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import decode_in_turns, make_turns, part_of
from mlx_redrafter.engine.engine import AnyDrafter
from mlx_redrafter.engine.generation import stream_generate

LOOKUP = "lookup alone"
# Added to the logit of the next token of the edited text.
FORCE = 1e4
# Words to replace in the document.
WORD_EDITS = {"times": "days", "age": "year", "book": "letter", "sister": "brother", "man": "woman"}
# Names to replace in the source code.
CODE_EDITS = {"values": "samples", "width": "window", "counts": "stock", "rows": "records"}


@dataclass(frozen=True)
class Copy:
    """A prompt, and the text to write after it.

    Attributes:
        prompt: The text to copy.
        answer: Token ids of the text with edits.
    """

    prompt: EncodedPrompt
    answer: list[int]


def make_copies(tokenizer: Any) -> list[Copy]:
    """Make a document and a file of source code, each with edits in every few lines."""
    document = " ".join(ENGLISH)
    sources = {"document": (document, WORD_EDITS), "code": ("".join(SOURCE_CODE), CODE_EDITS)}
    copies = []
    for name, (text, edits) in sources.items():
        edited = text
        for old, new in edits.items():
            edited = edited.replace(old, new, 1)
        ids, answer = (list(tokenizer.encode(one)) for one in (text, edited))
        copies.append(Copy(EncodedPrompt(name, name, ids), answer))
    return copies


def compare_copies(
    setting: CommonSettings,
    copies: Sequence[Copy],
    repeats: int,
    recording: Recording,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, list[Row]]:
    """Write every copy with every method, ``repeats`` times, in interleaved runs.

    Args:
        setting: The pair; ``max_tokens`` bounds the answers.
        copies: Prompts and answers.
        repeats: Rounds per copy.
        recording: Receives the runs; turns that it already has are not repeated.
        on_progress: Callback for the number of turns done and their total.

    Returns:
        Rows by name of the copy.
    """
    for index, copy in enumerate(copies):
        arms = _arms(replace(setting, max_tokens=min(setting.max_tokens, len(copy.answer))), copy)
        turns = make_turns([copy.prompt], repeats, copy.prompt.name)
        part = part_of(on_progress, index * repeats, len(copies) * repeats)
        decode_in_turns(arms, turns, recording, on_progress=part)
    found = {
        copy.prompt.name: summarise([r for r in recording.runs if r.group == copy.prompt.name])
        for copy in copies
    }
    recording.finish(found=found)
    return found


def _arms(setting: CommonSettings, copy: Copy) -> dict[str, Arm]:
    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        """Make the next token of the answer the only likely one, as a logits processor."""
        place = len(tokens) - len(copy.prompt.ids)
        wanted = copy.answer[min(place, len(copy.answer) - 1)]
        return logits + FORCE * (mx.arange(logits.shape[-1]) == wanted)

    def own(drafter: AnyDrafter) -> Arm:
        def decode(ids: list[int]) -> Iterator[Any]:
            yield from stream_generate(
                setting.model,
                setting.tokenizer,
                ids,
                drafter=drafter,
                max_tokens=setting.max_tokens,
                logits_processors=[force],
            )

        return decode

    def stock(ids: list[int]) -> Iterator[Any]:
        yield from mlx_lm.stream_generate(
            setting.model,
            setting.tokenizer,
            ids,
            max_tokens=setting.max_tokens,
            logits_processors=[force],
        )

    return {STOCK: stock, PLAIN: own(None), LOOKUP: own("lookup"), AUTO: own(setting.drafter)}

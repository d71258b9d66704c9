"""A conversation of an agent, as token ids: it grows turn by turn, and branches now and then."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq


@dataclass
class Trace:
    """Prompts of a conversation whose answers are not known before.

    The last prompt has about ``num_tokens``, and every fifth turn the conversation goes back to an
    earlier one. ``texts`` are prompts with their answers, also of earlier replays. Of the
    ``num_prompt`` tokens of all prompts no earlier text begins with ``num_ideal``.
    """

    num_turns: int
    num_tokens: int
    texts: list[list[int]] = field(default_factory=list)
    num_prompt: int = 0
    num_ideal: int = 0

    def replay(self, answer: Callable[[list[int]], list[int]]) -> None:
        """Send all prompts, one after the other, to what answers with tokens."""
        draw = random.Random(7)
        system = [draw.randrange(1, 60) for _ in range(self.num_tokens // 4)]
        history, turns = system, list[list[int]]()
        step = (self.num_tokens - len(system)) // self.num_turns
        for turn in range(self.num_turns):
            if turn % 5 == 4:
                # The user changes an earlier message: what follows it is gone.
                history = turns[len(turns) // 2]
            turns.append(history)
            asked = [draw.randrange(1, 60) for _ in range(step)]
            prompt = [*history, *asked]
            self.num_prompt += len(prompt)
            self.num_ideal += len(prompt) - self._longest(prompt)
            found = answer(prompt)
            # The last token of a text has been written, but not read by the model.
            self.texts.append([*prompt, *found])
            # A template may repeat an answer otherwise than the model wrote it.
            history = [*prompt, *found[: -draw.choice([0, 0, 0, 2]) or None]]

    def _longest(self, prompt: list[int]) -> int:
        common = (sum(takewhile(bool, map(eq, prompt, text))) for text in self.texts)
        return min(len(prompt) - 1, max(common, default=0))

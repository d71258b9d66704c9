"""Texts of one thread, which share their forward passes while there are several of them.

A text decodes alone until another one has begun, too; then both are at rest for a moment and move
into a batch, and the last one that is left moves out of it. A text moves with its keys and values,
and is the same wherever it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import mlx.nn as nn

from mlx_redrafter.decoding.batch import Batch, Progress
from mlx_redrafter.decoding.protocols import DraftPolicy
from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.errors import NonFiniteError


class StepScheduler:
    """Decodes the texts of one thread, each when it is asked for, or all of them.

    Args:
        batch: A batch without texts.
        policy_in_batch: Function from the policy of a text to the one that it has in the batch.
    """

    def __init__(
        self, batch: Batch, policy_in_batch: Callable[[DraftPolicy | None], DraftPolicy | None]
    ):
        self._batch = batch
        self._policy_in_batch = policy_in_batch
        # Texts that have begun, and their policies outside the batch.
        self._policies: dict[SequenceDecoder, DraftPolicy | None] = {}
        # What passes have brought texts that have not asked for it yet; those rest meanwhile.
        self._news: dict[SequenceDecoder, Progress] = {}

    @property
    def model(self) -> nn.Module:
        """The model whose texts they are."""
        return self._batch.target.model

    def begin(self, texts: Sequence[SequenceDecoder]) -> None:
        """Process the prompts of texts but for their last tokens, see `Batch.begin`."""
        self._batch.begin(texts)
        self._policies.update((text, text.policy) for text in texts if not text.is_finished)

    def step(self, text: SequenceDecoder) -> list[Token]:
        """The tokens of a text's next step, which may be those of other texts as well.

        Raises:
            NonFiniteError: The logits after the text so far are NaN.
        """
        if text not in self._policies:
            # Alone: whoever is told how far its prompt is may go on with other texts meanwhile.
            tokens = text.step()
            self._policies[text] = text.policy
            return tokens
        is_alone = len(self._policies) == 1
        if text in self._batch:
            rests = text not in self._news and self._batch.is_between_steps(text)
            if is_alone and rests:
                return self._part(text)
            while text not in self._news:
                self._step_all()
        elif text not in self._news:
            return text.step() if is_alone else self._join(text)
        progress = self._news.pop(text)
        if progress.error is not None:
            raise progress.error
        return progress.tokens

    def step_all(self) -> list[Progress]:
        """What the next forward pass brings all texts that have begun, or the next step a lone one.

        Raises:
            NonFiniteError: The logits after a text so far are NaN.
        """
        texts = list(self._policies)
        if len(texts) == 1:
            return [Progress(texts[0], self.step(texts[0]))]
        joining = [text for text in texts if text not in self._batch]
        joined = [Progress(text, self._join(text)) for text in joining]
        if any(progress.tokens for progress in joined):
            return joined
        self._step_all()
        news, self._news = list(self._news.values()), {}
        return news

    def has_news(self, text: SequenceDecoder) -> bool:
        """Whether the tokens of its next step are there already."""
        return text in self._news

    def leave(self, text: SequenceDecoder) -> None:
        """Let a text go, however it ended; its caches are its own again."""
        self._policies.pop(text, None)
        self._news.pop(text, None)
        if text in self._batch:
            self._batch.remove(text)

    def _join(self, text: SequenceDecoder) -> list[Token]:
        tokens = text.land()
        if not text.is_finished:
            self._batch.add(text)
            text.policy = self._policy_in_batch(text.policy)
        return tokens

    def _part(self, text: SequenceDecoder) -> list[Token]:
        tokens = text.land()
        self._batch.remove(text)
        text.policy = self._policies[text]
        return tokens

    def _step_all(self) -> None:
        for text, progress in list(self._news.items()):
            # The next pass writes where the tree in flight of a text that rests has its rows.
            if text in self._batch:
                with suppress(NonFiniteError):  # raised again in its own next step
                    self._news[text] = progress._replace(tokens=[*progress.tokens, *text.land()])
        resting = {text for text in self._batch.texts if text in self._news or text.is_finished}
        try:
            news = self._batch.step(resting)
        except Exception as error:  # whose fault it is, nobody knows
            news = [Progress(text, [], error) for text in self._batch.texts]
        self._news.update((progress.text, progress) for progress in news)

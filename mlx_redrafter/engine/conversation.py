"""A chat that processes only new tokens: its messages, and the K/V cache of the earlier ones.

conversation = Conversation(Engine(*load("org/model")))
for response in conversation.ask("Why is the sky blue?"):
    print(response.text, end="")
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlx_redrafter.checks import check_instance, check_max_tokens
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.prompt_encoding import Message, encode_chat, limit_text
from mlx_redrafter.engine.responses import GenerationResponse
from mlx_redrafter.engine.text_comparison import num_same
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.proposers.lookup import Contexts
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.tree_cache import parts_of

# Minimum room for an answer, as a share of the context.
LEAST_ROOM = 0.25
# Room for answers once messages are left out, which has the whole prompt read again.
MORE_ROOM = 0.5


class Conversation:
    """Messages of a user and a model, one after the other, for one thread.

    Args:
        engine: Engine of a model with a chat template; `ConfigError` without one.
        system_prompt: First message, from the system; None for none.
        template_options: Options of the chat template.

    Attributes:
        messages: All messages so far, with "role" and "content"; an answer joins them at its end.
        num_left_out: Number of the oldest messages that the model does not read any more, because
            the context is full. The system's message is not one of them.
    """

    def __init__(
        self,
        engine: Engine,
        system_prompt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ):
        check_instance("engine", engine, Engine, "an Engine")
        check_instance("system_prompt", system_prompt, (str, NoneType), "a text or None")
        expected = "a mapping of options"
        check_instance("template_options", template_options, (Mapping, NoneType), expected)
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(
                "a chat needs a model with a chat template, and this one has none; give it a text "
                'to continue (run NAME "...", or generate)'
            )
        self.messages: list[Message] = []
        if system_prompt is not None:
            self.messages.append({"role": "system", "content": system_prompt})
        self.num_left_out = 0
        self._engine = engine
        self._options = template_options
        self._cache = engine.new_prompt_cache()
        self._contexts = Contexts()
        # Token ids that the cache holds.
        self._tokens: list[int] = []
        # True while an answer goes on.
        self._is_answering = False

    def ask(self, text: str, **options: Any) -> Iterator[GenerationResponse]:
        """Answer a message. The answer ends with the iterator, at the latest when it is closed.

        It also ends where the model's context does. If that leaves little room for an answer, the
        model reads the newer half of the conversation only. Options are those of `Engine.stream`.

        Raises:
            ConfigError: The chat template rejects the message, or it alone is longer than the
                model's context, or another answer has not ended.
        """
        check_instance("text", text, str, "a text")
        if self._is_answering:  # before anything is taken out of its cache
            raise ConfigError(
                "another answer of this conversation has not ended; read it to its end or close it"
            )
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._encode(messages)
        if (limit := self._engine.target.context_length) is not None:
            left = limit - len(tokens)
            if left < 1:
                raise ConfigError(
                    f"the message has {len(tokens)} tokens, the model's context is {limit}; "
                    "shorten it"
                )
            wanted = options.get("max_tokens", GenerationOptions.max_tokens)
            check_max_tokens(wanted)
            options["max_tokens"] = limit_text(wanted, left)
        # A template may render earlier messages differently than the model wrote them.
        new, parts = tokens[self._keep(tokens) :], list[str]()
        self._is_answering = True
        try:
            with self._engine.stream(
                new, prompt_cache=self._cache, history=self._contexts, **options
            ) as stream:
                for response in stream:
                    tokens.append(response.token)
                    parts.append(response.text)
                    yield response
        finally:
            if parts:  # joined once: to add to a long answer token by token copies all of it
                answer = {"role": "assistant", "content": "".join(parts)}
                self.messages = [*messages, answer]
            # Fewer than all tokens if the prompt was interrupted.
            length = num_tokens(self._cache[: self._engine.target.num_layers])
            if length is None:  # such a cache does not record its length
                self._cache, length = self._engine.new_prompt_cache(), 0
            self._tokens, self._is_answering = tokens[:length], False

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Encode the messages that fit into the context with an answer after them."""
        tokenizer, limit = self._engine.tokenizer, self._engine.target.context_length
        num_system = int(bool(messages) and messages[0]["role"] == "system")
        system, turns = messages[:num_system], messages[num_system:]
        if self.num_left_out >= len(turns):  # the caller has taken messages away
            self.num_left_out = 0

        def encode(start: int) -> list[int]:
            return encode_chat(tokenizer, [*system, *turns[start:]], self._options, limit=limit)

        tokens = encode(self.num_left_out)
        if limit is None or limit - len(tokens) >= limit * LEAST_ROOM:
            return tokens
        most = limit * (1 - MORE_ROOM)
        # A question and its answer are left out together, and the newest question stays.
        starts = range(self.num_left_out, len(turns), 2)
        place = bisect_left(starts, True, lo=1, key=lambda start: len(encode(start)) <= most)
        self.num_left_out = starts[min(place, len(starts) - 1)]
        return encode(self.num_left_out)

    def _keep(self, tokens: list[int]) -> int:
        """Trim the cache to the prefix that it shares with a text, and return its length."""
        num_kept = min(num_same(self._tokens, tokens), len(tokens) - 1)
        num_gone = len(self._tokens) - num_kept
        # Neither the cache of a sliding window nor a recurrent state can go back, nor one of chunks
        # whose oldest entries are gone, whatever mlx-lm says of it.
        has_gone = any(getattr(layer, "start_position", 0) for layer in parts_of(self._cache))
        if num_gone and (has_gone or not can_trim_prompt_cache(self._cache)):
            self._cache, num_kept = self._engine.new_prompt_cache(), 0
        else:
            trim_prompt_cache(self._cache, num_gone)
        return num_kept

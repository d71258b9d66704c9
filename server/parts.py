"""The parts of an answer: content, reasoning and tool calls, read from the generated text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.device_read import as_rows, to_floats, to_ints, to_rows
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.responses import GenerationResponse
from mlx_redrafter.grammar import LateGrammar
from mlx_redrafter.server.answer_grammar import first_state
from mlx_redrafter.server.call_formats import find_format
from mlx_redrafter.server.call_reader import CallReader, ToolCall, add_call, new_id
from mlx_redrafter.server.requests import ChatRequest, CompletionRequest, TextRequest
from mlx_redrafter.server.tools import Tools

# Log-probability of a token with probability 0 in nats, since JSON has no infinity. As at OpenAI.
MIN_LOGPROB = -9999.0
# Tokens of a prompt whose logits are in memory at a time: 150 MB for 150,000 words in float32.
CHUNK = 256

# A token id and its log-probability, and the most probable ones at its place.
Score = tuple[int, float]


class TokenLogprob(NamedTuple):
    """A token's text, its natural log-probability, and the most probable tokens at its position.

    ``logprob`` is None for the first token of a prompt, which nothing predicts.
    """

    text: str
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass
class Part:
    """The addition of one token to an answer, or of several.

    Attributes:
        is_draft: Whether the newest token is an accepted draft.
        num_tokens: Tokens of the text so far.
        num_accepted: Accepted drafts among them.
        num_drafts: Drafts verified for the text so far.
        num_steps: Forward passes after the prompt so far.
        num_reasoning: Tokens of thinking so far.
        tool_calls: Tool calls, of which the first may go on one of the part before.
        finish_reason: "stop", "length" or "tool_calls" on the last part, else None.
        stop: Stop string that ended the text, if one did.
    """

    index: int
    is_draft: bool
    num_tokens: int
    num_accepted: int
    num_drafts: int
    num_steps: int
    num_reasoning: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.logprobs)

    def __add__(self, later: Part) -> Part:
        """Join this part and the next one; the lists of this one grow."""
        for call in later.tool_calls:
            add_call(self.tool_calls, call)
        self.logprobs += later.logprobs
        return replace(
            later,
            content=self.content + later.content,
            reasoning=self.reasoning + later.reasoning,
            tool_calls=self.tool_calls,
            logprobs=self.logprobs,
        )


class Answer:
    """The parts of one text, read from its tokens."""

    def __init__(
        self, request: TextRequest, tokenizer: TokenizerWrapper, prompt: list[int], index: int
    ):
        self._request = request
        self._tokenizer = tokenizer
        self._index = index
        stops = {"normal": [(stop, None) for stop in request.stops]}
        self._stopping = TextStateMachine(stops).make_state()
        tools = request.tools if isinstance(request, ChatRequest) else Tools([])
        self._tools = tools.definitions
        form = find_format(tokenizer) if request.grammar and tools.callable else None
        # Reads the calls that the grammar holds; mlx-lm's parser reads all others.
        self._reader = None if form is None else CallReader(form, tools)
        states, self._kind = TextStateMachine(), "normal"
        if isinstance(request, ChatRequest) and (request.grammar is None or self._reader):
            states = make_text_state_machine(tokenizer)
            self._kind = first_state(tokenizer, prompt)
        elif isinstance(request.grammar, LateGrammar):  # the JSON comes after the thinking
            marks = {"reasoning": [(tokenizer.think_end, "normal")], "normal": []}
            states, self._kind = TextStateMachine(marks), "reasoning"
        self._machine = states.make_state(self._kind)
        self._call, self._has_called = "", False
        self._ids: set[str] = set()
        # Texts of the tokens whose log-probabilities were shown: a long prompt has many of each.
        self._texts: dict[int, str] = {}
        # White space that is part of the text unless a call follows.
        self._blank = ""
        self._num_accepted = self._num_reasoning = 0

    def add(self, response: GenerationResponse) -> Part:
        """Return the part that a token adds, which is the last one after a stop string."""
        self._num_accepted += response.from_draft
        part = Part(
            index=self._index,
            is_draft=response.from_draft,
            num_tokens=response.generation_tokens,
            num_accepted=self._num_accepted,
            num_drafts=response.stats.num_verified - response.steps,
            num_steps=response.steps,
        )
        if self._request.top_logprobs is not None and response.finish_reason != "stop":
            part.logprobs = [self._read_logprobs(response, self._request.top_logprobs)]
        pending, added = self._stopping[3], response.text
        echoes = isinstance(self._request, CompletionRequest) and self._request.echoes
        is_first = part.num_tokens == 1 and (echoes or part.logprobs)
        if is_first and self._loses_blank(response.token):
            if echoes:  # the prompt stands before it
                added = " " + added
            else:
                part.logprobs = list(map(_without_blank, part.logprobs))
        self._stopping, segments = TextStateMachine.split(self._stopping, added)
        text = "".join(text for _, text in segments)
        is_stopped = self._stopping[0] is None
        if is_stopped:
            seen = pending + added
            found = [stop for stop in reversed(self._request.stops) if stop in seen]
            part.stop = min(found, key=lambda stop: seen.find(stop) + len(stop))
        part.finish_reason = "stop" if is_stopped else response.finish_reason
        if response.finish_reason and not is_stopped:
            text += TextStateMachine.flush(self._stopping)[1]
        for character in text:
            if self._reader is not None and self._reader.is_in_value:
                self._read_call(part, self._reader.add(character))
                continue
            self._machine, segments = TextStateMachine.split(self._machine, character)
            for kind, piece in segments:
                self._sort(part, kind, piece)
        self._num_reasoning += self._kind == "reasoning"
        part.num_reasoning = self._num_reasoning
        if part.finish_reason:
            self._sort(part, self._machine[0], TextStateMachine.flush(self._machine)[1])
            if self._kind == "tool":
                self._end_call(part, "")  # the text ended before the call did
            part.content += "" if self._has_called else self._blank
            is_cut = self._reader is not None and self._reader.is_open
            if self._has_called and part.finish_reason == "stop" and not is_cut:
                part.finish_reason = "tool_calls"
        return part

    def _sort(self, part: Part, kind: str, text: str) -> None:
        if self._kind == "tool" and kind != "tool":
            self._end_call(part, self._tokenizer.tool_call_end or "")
        self._kind = kind
        if kind == "tool":
            self._call += text
            if self._reader is not None:
                for character in text:
                    self._read_call(part, self._reader.add(character))
        elif kind == "reasoning":
            part.reasoning += text
        elif kind == "normal":  # others are headers
            text, self._blank = self._blank + text, ""
            if self._tools:
                self._blank = text[len(text.rstrip()) :]
            part.content += text.removesuffix(self._blank)
            if text.strip() and self._request.format is not None:  # JSON, in which no marker counts
                self._machine = TextStateMachine().make_state("normal")

    def _read_call(self, part: Part, piece: ToolCall | None) -> None:
        if piece is not None:
            add_call(part.tool_calls, piece)
            self._call, self._blank, self._has_called = "", "", True

    def _end_call(self, part: Part, mark: str) -> None:
        """End the tool calls between two markers; text that is none is shown as such."""
        text, self._call = self._call, ""
        if self._reader is not None:
            if mark:
                self._read_call(part, self._reader.end())
            is_read = self._has_called
        else:
            calls = self._parse_calls(text) if self._tools else []
            part.tool_calls += calls
            is_read = bool(calls)
            self._has_called |= is_read
        if not is_read:
            text = f"{self._tokenizer.tool_call_start or ''}{text}{mark}"
            part.content += self._blank + text
        self._blank = ""

    def _parse_calls(self, text: str) -> list[ToolCall]:
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            return [
                ToolCall(
                    new_id(str(call.get("id") or ""), self._ids),
                    str(call["name"]),
                    json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False),
                )
                for call in (parsed if isinstance(parsed, list) else [parsed])
            ]
        except Exception:  # mlx-lm's parsers raise exceptions of any kind for malformed calls
            return []

    def repeat(self, text: str, first: int, scores: Iterable[tuple[Score, list[Score]]]) -> Part:
        """Return a part that repeats a prompt, given the scores of all but its first token."""
        part = Part(self._index, False, 0, 0, 0, 0, content=text)
        if self._request.top_logprobs is not None:
            name = self._name(first, 0.0).text
            name = name if text.startswith(name) else name.removeprefix(" ")
            part.logprobs = [TokenLogprob(name, None)]
            for chosen, top in scores:
                others = tuple(self._name(*one) for one in top)
                part.logprobs.append(self._name(*chosen)._replace(top=others))
        return part

    def _read_logprobs(self, response: GenerationResponse, num_top: int) -> TokenLogprob:
        log_probs = response.logprobs.astype(mx.float32)
        ids = [response.token]
        if num_top:
            ids += to_ints(mx.argsort(-log_probs)[:num_top])
        values = to_floats(log_probs[mx.array(ids)])
        chosen, *top = map(self._name, ids, values)
        return chosen._replace(top=tuple(top))

    def _name(self, token: int, value: float) -> TokenLogprob:
        text = self._texts.get(token)
        if text is None:
            # At the beginning of a text, tokenizers leave out the blank of the first token.
            text = self._texts[token] = self._decode(token, self._letter)
        return TokenLogprob(text, max(value, MIN_LOGPROB))

    def _decode(self, token: int, before: Iterable[int]) -> str:
        """Decode a token as it stands after others; U+FFFD for a part of a character."""
        detokenizer = self._tokenizer.detokenizer
        for one in before:
            detokenizer.add_token(one)
        start = len(detokenizer.text)
        detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text[start:]

    def _loses_blank(self, token: int) -> bool:
        """Return whether the tokenizer leaves out the blank of a text's first token."""
        return self._decode(token, self._letter)[:1] == " " != self._decode(token, ())[:1]

    @cached_property
    def _letter(self) -> list[int]:
        return list(self._tokenizer.encode("a", add_special_tokens=False))


def _without_blank(token: TokenLogprob) -> TokenLogprob:
    """Name a token, and the most probable ones at its position, as at the beginning of a text."""
    top = tuple(map(_without_blank, token.top))
    return token._replace(text=token.text.removeprefix(" "), top=top)


def score_prompt(
    engine: Engine, tokens: list[int], num_top: int
) -> Iterator[list[tuple[Score, list[Score]]]]:
    """Yield the scores of every token but the first, and the ``num_top`` best there, by chunks."""
    model = engine.target.stock_model
    cache = make_prompt_cache(engine.target.model)
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : start + CHUNK]
        logits = model(mx.array([chunk]), cache=cache)[0].astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        following = tokens[start + 1 : start + 1 + len(chunk)]
        rows = scores[: len(following)]
        chosen = to_floats(mx.take_along_axis(rows, mx.array(following)[:, None], axis=1)[:, 0])
        best = mx.argsort(-rows, axis=-1)[:, :num_top]
        best_scores = as_rows(mx.take_along_axis(rows, best, axis=-1)).tolist()
        mx.eval([layer.state for layer in cache])
        yield [
            ((token, score), list(zip(ids, values, strict=True)))
            for token, score, ids, values in zip(
                following, chosen, to_rows(best), best_scores, strict=True
            )
        ]

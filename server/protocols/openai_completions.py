"""OpenAI's ``/v1/completions``."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.fields import Fields
from mlx_redrafter.server.parts import Part, TokenLogprob
from mlx_redrafter.server.protocols.openai_fields import read_common
from mlx_redrafter.server.protocols.service import MakeWriter, Routes, Service
from mlx_redrafter.server.protocols.writer import ChoiceWriter, StreamOptions
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import MAX_TEXTS, CompletionRequest


def read(body: object, defaults: GenerationOptions) -> tuple[CompletionRequest, MakeWriter]:
    fields = Fields(body)
    top = fields.integer("logprobs", 0, 5)  # as at OpenAI
    echoes = fields.typed("echo", bool) or False
    fields.one_of("suffix", [""])
    fields.one_of("best_of", [1])
    prompt = fields.take("prompt")
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts = prompt if is_several else [prompt]
    if not all(map(_is_prompt, prompts)) or len(prompts) > MAX_TEXTS:
        expected = f"a text, a list of token ids, or a list of at most {MAX_TEXTS} of them"
        raise fields.refusal("prompt", expected, prompt)
    limit = fields.values.get("max_tokens")
    ends_there = echoes and type(limit) is int and limit == 0
    if ends_there:
        fields.take("max_tokens")
    common, options = read_common(fields, defaults, top)
    if len(prompts) * common["num_texts"] > MAX_TEXTS:
        raise Refusal(f"n times the prompts must be at most {MAX_TEXTS}", "n")
    request = CompletionRequest(**common, prompts=prompts, echoes=echoes, ends_there=ends_there)
    return request, partial(CompletionWriter, request, options)


class CompletionWriter(ChoiceWriter):
    def __init__(self, request: CompletionRequest, options: StreamOptions, model: str):
        super().__init__("cmpl", "text_completion", options, model)
        self._request = request
        # Characters of the tokens of each text so far, if they are shown.
        self._lengths: dict[int, int] = {}

    def choice(self, part: Part, name: str) -> dict[str, Any]:
        offset = self._lengths.get(part.index, 0)
        self._lengths[part.index] = offset + sum(len(token.text) for token in part.logprobs)
        shows = self._request.top_logprobs is not None
        return {
            "index": part.index,
            "finish_reason": part.finish_reason,
            "text": part.content,
            "logprobs": _format_logprobs(part.logprobs, offset) if shows else None,
        }


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token) is int for token in prompt)
    return isinstance(prompt, str)


def _format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Format log-probabilities; the offsets count characters of the text."""
    texts = [token.text for token in tokens]
    ends = list(accumulate(map(len, texts), initial=offset))
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else _name_by_text(token.top) for token in tokens
        ],
        "text_offset": ends[:-1],
    }


def _name_by_text(top: Sequence[TokenLogprob]) -> dict[str, float | None]:
    """Name log-probabilities, largest first, by text; of equal texts the first one counts."""
    found: dict[str, float | None] = {}
    for one in top:
        found.setdefault(one.text, one.logprob)
    return found


ROUTES: Routes = {("POST", "/v1/completions"): partial(Service.answer, reader=read)}

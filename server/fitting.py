"""A request as the model can take it: token ids of its prompts, and options within its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.prompt_encoding import check_prompt, encode_chat, encode_prompt
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.requests import ChatRequest, CompletionRequest, TextRequest


def fit(
    request: TextRequest, engine: Engine, max_context: int
) -> tuple[TextRequest, list[list[int]]]:
    """The request with texts that end where the context does, and its prompts.

    Args:
        request: The request.
        engine: Engine of the model.
        max_context: Most tokens of a prompt and its text.

    Raises:
        Refusal: The model cannot take it.
    """
    target = engine.target
    context = min(max_context, target.context_length or max_context)
    prompts, param = _encode(request, engine)
    longest = max(map(len, prompts))
    if longest >= context:
        raise Refusal(
            f"{param} must be below the context of {context} tokens, got {longest}; shorten it",
            param,
            code="context_length_exceeded",
        )
    try:
        for prompt in prompts:
            check_prompt(prompt, 0, target)
    except ConfigError as error:
        raise Refusal(str(error), param) from error
    biased = max(request.penalties.get("logit_bias") or [0])
    if biased >= target.vocab_size:
        raise Refusal(
            f"logit_bias must have token ids below {target.vocab_size}, got {biased}", "logit_bias"
        )
    if request.grammar is not None:
        try:
            engine.masks(request.grammar)
        except ConfigError as error:
            raise Refusal(f"response_format: {error}", "response_format") from error
    options, left = request.options, context - longest
    changed: dict[str, Any] = {"top_k": 0} if (options.top_k or 0) >= target.vocab_size else {}
    if not 0 < options.max_tokens <= left:
        changed["max_tokens"] = left
    return replace(request, options=replace(options, **changed)), prompts


def _encode(request: TextRequest, engine: Engine) -> tuple[list[list[int]], str]:
    """Token ids of the prompts, and the field that they come from."""
    tokenizer = engine.tokenizer
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    try:
        if isinstance(request, CompletionRequest):
            return [encode_prompt(tokenizer, prompt) for prompt in request.prompts], param
        assert isinstance(request, ChatRequest)
        if not tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template; use /v1/completions")
        if request.tools and not tokenizer.has_tool_calling:
            raise Refusal(
                "the model's chat template has no calls of tools; leave them out", "tools"
            )
        options = {
            **request.template_options,
            **({"tools": request.tools} if request.tools else {}),
        }
        return [encode_chat(tokenizer, request.messages, options)], param
    except ConfigError as error:
        raise Refusal(str(error), param) from error

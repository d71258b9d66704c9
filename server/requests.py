"""The record of a request, which every protocol's reader makes, and its check against the model."""

from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.prompt_encoding import (
    LongPromptError,
    check_prompt,
    encode_chat,
    encode_prompt,
)
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.grammar import Grammar, LateGrammar
from mlx_redrafter.server.answer_grammar import AnswerFormat, make_grammar
from mlx_redrafter.server.refusals import ContextExceeded, Refusal
from mlx_redrafter.server.tools import Tools

# Maximum number of texts of one request: n times the number of prompts.
MAX_TEXTS = 16


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request for one or several texts.

    Attributes:
        model: Name of the model; None for the server's.
        options: Options of the texts, with the seed of the first one.
        is_streamed: Whether to send parts as soon as they are generated.
        num_texts: Number of texts for every prompt; each has the seed of the previous one plus 1.
        penalties: Arguments of mlx-lm's ``make_logits_processors``.
        format: JSON that the texts must be; None for free texts.
        top_logprobs: Number of most probable tokens shown with each token; None shows no
            log-probabilities.
        grammar: Grammar of the texts, which `fit` makes; None for none.
        param: Field of the prompts, for messages.
    """

    model: str | None
    options: GenerationOptions
    is_streamed: bool
    num_texts: int = 1
    stops: tuple[str, ...] = ()
    penalties: dict[str, Any] = field(default_factory=dict)
    format: AnswerFormat | None = None
    top_logprobs: int | None = None
    grammar: Grammar | LateGrammar | None = None
    param: str = "prompt"


@dataclass(frozen=True, kw_only=True)
class ChatRequest(TextRequest):
    """A request for answers in a chat; ``messages`` have the form that chat templates expect.

    ``effort`` is a word for the amount of thinking, for templates that read ``reasoning_effort``.
    """

    messages: list[dict[str, Any]]
    tools: Tools
    template_options: dict[str, Any]
    effort: str | None = None
    param: str = "messages"


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(TextRequest):
    """A request for continuations of texts or token ids.

    If it ``echoes``, the texts begin with their prompts. If it ``ends_there``, they are their
    prompts only, for clients that ask for likelihoods.
    """

    prompts: list[str | list[int]]
    echoes: bool = False
    ends_there: bool = False


def fit(request: TextRequest, engine: Engine, context: int) -> tuple[TextRequest, list[list[int]]]:
    """Check a request against the model.

    ``context`` is the maximum number of tokens of a prompt and its text. Return the request with
    ``top_k`` within the model's vocabulary, and the token ids of its prompts. Refuse what needs
    more context, or a chat template, tools or grammars that the model lacks.
    """
    target = engine.target
    prompts = encode(request, engine, context)
    longest = max(map(len, prompts))
    ends_there = isinstance(request, CompletionRequest) and request.ends_there
    if longest + (not ends_there) > context:
        raise ContextExceeded(request.param, longest, context, request.options.max_tokens)
    try:
        for prompt in prompts:
            check_prompt(prompt, 0, target)
    except ConfigError as error:
        raise Refusal(str(error), request.param) from error
    biased = max(request.penalties.get("logit_bias") or [0])
    if biased >= target.vocab_size:
        raise Refusal(
            f"logit_bias must have token ids below {target.vocab_size}, got {biased}", "logit_bias"
        )
    tools = request.tools if isinstance(request, ChatRequest) else None
    grammar = make_grammar(engine, prompts[0], tools, request.format)
    options = request.options
    if (options.top_k or 0) >= target.vocab_size:
        options = replace(options, top_k=0)
    return replace(request, options=options, grammar=grammar), prompts


def encode(request: TextRequest, engine: Engine, context: int) -> list[list[int]]:
    """Encode the prompts of a request; raise `ContextExceeded` if one is clearly too long."""
    tokenizer = engine.tokenizer
    try:
        if isinstance(request, CompletionRequest):
            return [encode_prompt(tokenizer, one, context) for one in request.prompts]
        assert isinstance(request, ChatRequest)
        if not tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template; use /v1/completions")
        if request.tools.definitions and not tokenizer.has_tool_calling:
            raise Refusal(
                "the chat template of the model has no tool calls; leave the tools out", "tools"
            )
        options = _template_options(request, tokenizer)
        return [encode_chat(tokenizer, request.messages, options, limit=context)]
    except LongPromptError as error:
        raise ContextExceeded(
            request.param, error.num_tokens, context, request.options.max_tokens
        ) from error
    except ConfigError as error:
        raise Refusal(str(error), request.param) from error


def _template_options(request: ChatRequest, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    options = dict(request.template_options)
    if request.tools.definitions:
        options["tools"] = request.tools.definitions
    # A template written in Python may reject an option that it does not read.
    if request.effort and "reasoning_effort" in str(tokenizer.chat_template):
        options.setdefault("reasoning_effort", request.effort)
    return options

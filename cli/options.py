"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.config import TreeShape, find_shape
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_redrafter.proposers.redrafter.network import Drafter

MODEL, DRAFT, SAMPLE, PROMPT = "Model", "Drafting", "Sampling", "Prompt"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Target: a folder or a hub repository. The bundled pair by default.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
NamedModel = Annotated[
    str | None,
    typer.Option("--model", help="Target: a folder or a hub repository.", rich_help_panel=MODEL),
]
DrafterPath = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "--draft-model",
        help="Drafter made for the target: a folder or a hub repository.",
        rich_help_panel=MODEL,
    ),
]
AdapterPath = Annotated[
    str | None,
    typer.Option("--adapter-path", help="LoRA adapter of the target.", rich_help_panel=MODEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code from the target's checkpoint.", rich_help_panel=MODEL
    ),
]
ExtraEosToken = Annotated[
    list[str] | None,
    typer.Option("--extra-eos-token", help="Also stop at this token.", rich_help_panel=MODEL),
]
Prompt = Annotated[
    str,
    typer.Option(
        "--prompt",
        "-p",
        help="The prompt; - reads it from stdin.",
        show_default=False,
        rich_help_panel=PROMPT,
    ),
]
IgnoreChatTemplate = Annotated[
    bool,
    typer.Option("--ignore-chat-template", help="Use the prompt as it is.", rich_help_panel=PROMPT),
]
ChatTemplateConfig = Annotated[
    str | None,
    typer.Option(
        "--chat-template-config",
        help="JSON object of options for the chat template.",
        rich_help_panel=PROMPT,
    ),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(
        "--system-prompt", help="System message for the chat template.", rich_help_panel=PROMPT
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-m", help="Most tokens to generate, -1 for no limit."),
]
Temp = Annotated[
    float,
    typer.Option("--temp", help="Temperature; 0 is greedy.", rich_help_panel=SAMPLE),
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Nucleus mass, 0: off.", rich_help_panel=SAMPLE)
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Most probable tokens kept, 0: off.", rich_help_panel=SAMPLE)
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Least probability relative to the most probable token, 0: off.",
        rich_help_panel=SAMPLE,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Of the noise; fresh by default.", show_default=False, rich_help_panel=SAMPLE
    ),
]


def parse_size(value: str) -> int | str:
    """A number, or ``auto``."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"expected a number or auto, got {value!r}") from None


# int | "auto", which typer has no type for.
BeamWidth = Annotated[
    Any,
    typer.Option(
        "--beam-width",
        parser=parse_size,
        metavar="<int>|auto",
        help="Beams kept per level, 1 to 64. With auto for this and the next two, every step "
        "verifies the drafts whose probabilities are worth the time, or nothing is drafted.",
        rich_help_panel=DRAFT,
    ),
]
BeamLength = Annotated[
    Any,
    typer.Option(
        "--beam-length",
        parser=parse_size,
        metavar="<int>|auto",
        help="Tokens per beam, root included, 2 to 16.",
        rich_help_panel=DRAFT,
    ),
]
TreeNodes = Annotated[
    Any,
    typer.Option(
        "--tree-nodes",
        parser=parse_size,
        metavar="<int>|auto",
        help="Tokens per verify, root included.",
        rich_help_panel=DRAFT,
    ),
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        help="top_n: the most probable drafts; beam: the paper's merged beams.",
        rich_help_panel=DRAFT,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Drafting:
    """What to draft, as given on the command line."""

    beam_width: Any
    beam_length: Any
    tree_nodes: Any
    select: Any

    def shape(self) -> TreeShape | None:
        """The shape that all steps have, None if every step is given its own.

        Raises:
            ConfigError: A value is out of range, or they contradict each other.
        """
        return find_shape(**vars(self))


@dataclass(frozen=True)
class Loading:
    """What to load, as given on the command line: without a model, the bundled pair.

    With a drafter and no model it is that drafter for the bundled target.
    """

    model: str | None
    drafter: str | None
    adapter_path: str | None
    trust_remote_code: bool
    extra_eos_token: list[str]
    drafts: bool = True

    def load(self) -> tuple[nn.Module, TokenizerWrapper, Drafter | None]:
        """Load the target, its tokenizer and the drafter, if any."""
        from mlx_redrafter.loading import load

        model, tokenizer, drafter = load(
            self.model,
            self.drafter if self.drafts else None,
            adapter_path=self.adapter_path,
            trust_remote_code=self.trust_remote_code,
        )
        for token in self.extra_eos_token:
            _add_stop_token(tokenizer, token)
        if self.model is None:
            _say_bundled(model)
        return model, tokenizer, drafter if self.drafts else None


@dataclass(frozen=True)
class Prompting:
    """The prompt, and how it becomes token ids."""

    text: str
    ignore_chat_template: bool
    chat_template_config: str | None
    system_prompt: str | None

    def read(self) -> str:
        """The prompt's text, from stdin if it is ``-``."""
        try:
            text = sys.stdin.read() if self.text == "-" else self.text
            text.encode()  # other bytes pass as lone surrogates, where Python is told to allow it
        except UnicodeError as error:
            raise ConfigError(f"the prompt must be UTF-8 text: {error}") from error
        return text if self.text == "-" else text.replace("\\n", "\n").replace("\\t", "\t")

    def template_options(self) -> dict[str, Any]:
        """The options for the chat template."""
        try:
            options = json.loads(self.chat_template_config or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(f"--chat-template-config must be JSON: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"--chat-template-config must be a JSON object, got {options!r}")
        return options

    def encode(self, tokenizer: TokenizerWrapper, follows_cache: bool = False) -> list[int]:
        """Token ids as `mlx_lm.generate` makes them.

        Args:
            tokenizer: The target's.
            follows_cache: The prompt continues a stored cache, so the template's beginning is
                left out.
        """
        text = self.read()
        if self.ignore_chat_template or not tokenizer.has_chat_template:
            if self.system_prompt is not None:
                raise ConfigError(
                    "--system-prompt needs a chat template; the model has none, or "
                    "--ignore-chat-template is given"
                )
            return list(tokenizer.encode(text))
        options = self.template_options()
        prompt = self._apply_template(tokenizer, text, options)
        if follows_cache:
            marker = "<query>"
            with_marker = self._apply_template(tokenizer, marker, options)
            prompt = prompt[with_marker.index(marker) :]
        return list(tokenizer.encode(prompt, add_special_tokens=False))

    def _apply_template(
        self, tokenizer: TokenizerWrapper, text: str, options: dict[str, Any]
    ) -> str:
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        from jinja2 import TemplateError

        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the model's chat template refuses the prompt: {error}; change its options, or "
                "use --ignore-chat-template"
            ) from error


def _say_bundled(model: nn.Module) -> None:
    from mlx_redrafter.checkpoint import named_parameters

    size = sum(tensor.size for tensor in named_parameters(model).values())
    typer.echo(
        f"no --model given: using the bundled demonstration model ({size / 1e6:.1f}M parameters, "
        "trained on public-domain books); --model FOLDER or ORG/NAME for your own",
        err=True,
    )


def _add_stop_token(tokenizer: TokenizerWrapper, token: str) -> None:
    # For a name it does not know a tokenizer may answer with its unknown token.
    vocabulary = tokenizer.get_vocab()
    is_id = token.isdecimal() and int(token) in vocabulary.values()
    if not is_id and token not in vocabulary:
        raise ConfigError(f"--extra-eos-token must be a token of the model or an id, got {token!r}")
    tokenizer.add_eos_token(token)


def fresh_seed(seed: int | None) -> int:
    """The seed given, or a new one."""
    return secrets.randbits(32) if seed is None else seed

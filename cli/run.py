"""``redrafter-mlx run``: a model by its name alone, downloaded if the user agrees."""

from typing import Annotated, Any

import typer

from mlx_redrafter.cli.chat import ChatPair, chat
from mlx_redrafter.cli.generate import GeneratingPair, GrammarOptions, generate
from mlx_redrafter.cli.model_options import AUTO, AutoDrafter, Yes
from mlx_redrafter.cli.prompt_options import PromptFile, PromptOptions, SystemPrompt
from mlx_redrafter.cli.text_options import AnswerOptions, DraftOptions, WholeTextOptions
from mlx_redrafter.errors import ConfigError


def run_model(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, repository, or the last part of a repository's name; without an owner, "
            "first on this machine, then of mlx-community.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt of one text; a conversation without it.")
    ] = None,
    *,
    model: Annotated[str | None, "The same as the first argument."] = None,
    prompt_file: PromptFile = None,
    drafter: AutoDrafter = AUTO,
    system_prompt: SystemPrompt = None,
    text: AnswerOptions,
    yes: Yes = False,
) -> None:
    """Talk to a model, or generate one text, with the best drafter that can be found for it.

    A model that is not on this machine is downloaded after a question.
    """
    if model is None:
        model = name
    elif prompt is None:
        prompt = name
    elif name is not None:
        raise typer.BadParameter("the model is given twice; leave one out")
    if model is None:
        raise ConfigError(
            "expected a model, found none; redrafter-mlx list shows those that are here, and "
            "redrafter-mlx try needs none"
        )
    if prompt is None and prompt_file is None:
        chat(ChatPair(model, drafter, yes), system_prompt=system_prompt, text=text)
        return
    values: dict[str, Any] = vars(text)
    generate(
        PromptOptions(prompt, prompt_file=prompt_file, system_prompt=system_prompt),
        GeneratingPair(model, drafter, yes),
        WholeTextOptions(**values),
        GrammarOptions(),
        DraftOptions(),
    )

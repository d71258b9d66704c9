"""``redrafter-mlx run``: a model by its name alone, downloaded if the user agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_redrafter.cli.chat import ChatPair, chat
from mlx_redrafter.cli.choose_drafter import AUTO
from mlx_redrafter.cli.generate import GeneratingPair, GrammarOptions, generate
from mlx_redrafter.cli.models import Name, agrees, complete_name
from mlx_redrafter.cli.prompt_options import PromptOptions
from mlx_redrafter.cli.text_options import AnswerOptions, DraftOptions, MaxTokens, WholeTextOptions
from mlx_redrafter.errors import CheckpointError, ResourceError


def run_model(
    name: Name,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Prompt of one text; a conversation without it."),
    ] = None,
    max_tokens: MaxTokens = AnswerOptions.max_tokens,
    yes: Annotated[bool, "Download the model and its drafter without a question."] = False,
) -> None:
    """Talk to a model, or generate one text, with the best drafter that can be found for it.

    The model is a folder, a repository, or the last part of a repository's name. It is downloaded
    if it is not on this machine.
    """
    model = find_model(name, yes)
    if prompt is None:
        chat(ChatPair(model, AUTO, yes), text=AnswerOptions(max_tokens=max_tokens))
    else:
        generate(
            PromptOptions(prompt),
            GeneratingPair(model, AUTO, yes),
            WholeTextOptions(max_tokens=max_tokens),
            GrammarOptions(),
            DraftOptions(),
        )


def find_model(name: str, yes: bool) -> str:
    """Return the name of a model on this machine, after a download if the user agrees."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    from mlx_redrafter.checkpoint_files import CONFIG_FILE, read_config
    from mlx_redrafter.hub import download, find_repository
    from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
    from mlx_redrafter.model_store import find_stored
    from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE
    from mlx_redrafter.target.model_parts import check_config

    if name and Path(name).expanduser().is_dir():
        return name
    full = complete_name(name)
    if find_stored(full, DEFAULT_ALLOW_PATTERNS) is not None:
        return full
    repository = find_repository(full, [CONFIG_FILE, *DEFAULT_ALLOW_PATTERNS])
    config = read_config(download(repository, [CONFIG_FILE]))
    if config.get("model_type") == MODEL_TYPE:
        raise CheckpointError(f"{full} is a drafter; give it with --drafter, next to its --model")
    check_config(config)
    size, memory = repository.size(DEFAULT_ALLOW_PATTERNS), read_total_memory()
    if memory is not None and size > memory:
        raise ResourceError(
            f"{full} has {format_bytes(size)}, and this machine has {format_bytes(memory)} of "
            "memory; use a copy in fewer bits, or a smaller model"
        )
    licence = repository.licence or "not stated"
    if not agrees(f"Download {full} ({format_bytes(size)}, licence {licence})?", yes):
        typer.echo("not downloaded", err=True)
        raise typer.Exit(1)
    download(repository, DEFAULT_ALLOW_PATTERNS)
    return full

"""Options of ``redrafter-mlx train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TEXT, NETWORK, TRAINING = "Text", "Drafter", "Training"

Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The drafter; also holds the run.")
]
DataFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help='Text, or jsonl with "text", "messages" or "prompt". May be repeated.',
        show_default=False,
        rich_help_panel=TEXT,
    ),
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts that the model answers: one a line, or jsonl. May be repeated.",
        show_default=False,
        rich_help_panel=TEXT,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        help="Most tokens to train on; all.",
        show_default=False,
        rich_help_panel=TEXT,
    ),
]
SelfWritten = Annotated[
    float,
    typer.Option(
        "--self-written",
        help="Share of the tokens that the model writes itself, 0 to 1.",
        rich_help_panel=TEXT,
    ),
]
AnswerTokens = Annotated[
    int,
    typer.Option("--answer-tokens", help="Most tokens of a text it writes.", rich_help_panel=TEXT),
]
WriterTemp = Annotated[
    float,
    typer.Option(
        "--temp",
        help="Temperature of half of these texts; the others are greedy.",
        rich_help_panel=TEXT,
    ),
]
TeacherCache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="What the model says of the texts; to be shared by runs. OUT/cache.",
        show_default=False,
        rich_help_panel=TEXT,
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--start-from",
        metavar="DRAFTER",
        help="Go on from this drafter, a folder or repository; a new one.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        help="What to teach: soft, the model's distributions; coupled, to sample as it does; "
        "apple, the text; rollouts.",
        rich_help_panel=TRAINING,
    ),
]
Epochs = Annotated[
    int, typer.Option("--epochs", help="Passes over the text.", rich_help_panel=TRAINING)
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        help="Train about this long instead.",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option("--batch-tokens", help="Positions per step.", rich_help_panel=TRAINING),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        help="Peak learning rate; by the drafter's width.",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", help="Of texts, weights and order.", rich_help_panel=TRAINING),
]
ExitDim = Annotated[
    int | None,
    typer.Option(
        "--exit-dim",
        help="Width of the head; 1024, or twice the hidden size if that is less.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
Layers = Annotated[
    int,
    typer.Option("--layers", help="Residual blocks before the head.", rich_help_panel=NETWORK),
]
Length = Annotated[
    int,
    typer.Option(
        "--length",
        help="Tokens per beam to train for, root included.",
        rich_help_panel=NETWORK,
    ),
]
DraftVocab = Annotated[
    int | None,
    typer.Option(
        "--draft-vocab",
        help="Propose only so many tokens, the most frequent ones; all.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="Of the weights written.", rich_help_panel=NETWORK),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]

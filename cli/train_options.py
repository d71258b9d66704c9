"""Options of ``redrafter-mlx train``, a record for each group of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlx_redrafter.cli.model_options import AdapterPath, NamedModel, TrustRemoteCode

TEXT, NETWORK, TRAINING = "Text", "Drafter", "Training"


@dataclass(frozen=True)
class Run:
    """The run, and where it is kept."""

    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="Folder for the drafter; also holds the run."),
    ]
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the run takes: time, disk and memory. No more."),
    ] = False


@dataclass(frozen=True)
class Target:
    """The model to train a drafter for."""

    model: NamedModel = None
    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class Texts:
    """The texts to train on."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help='Text, or jsonl with "text", "messages" or "prompt". May be repeated.',
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts that the model answers: one a line, or jsonl. May be repeated.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens to train on; all by default.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None
    self_written: Annotated[
        float,
        typer.Option(
            help="Share of the tokens that the model writes itself, 0 to 1.", rich_help_panel=TEXT
        ),
    ] = 0.5
    answer_tokens: Annotated[
        int, typer.Option(help="Most tokens of a text that the model writes.", rich_help_panel=TEXT)
    ] = 256
    temp: Annotated[
        float,
        typer.Option(
            help="Temperature of half of the texts that the model writes; the others are greedy.",
            rich_help_panel=TEXT,
        ),
    ] = 0.8
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the model's outputs on the texts, which runs may share; by default "
            "OUT/cache.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None


@dataclass(frozen=True)
class Network:
    """The drafter."""

    head: Annotated[
        str,
        typer.Option(
            help="Kind of drafter: redrafter, a recurrent one; medusa; eagle, EAGLE-3; eagle1; "
            "mtp, an MTP module; or specformer.",
            rich_help_panel=NETWORK,
        ),
    ] = "redrafter"
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTER",
            help="Drafter to go on from, a folder or repository; by default a new one.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    exit_dim: Annotated[
        int | None,
        typer.Option(
            help="Width of the head; by default 1024, or twice the hidden size if that is less.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            help="Residual blocks before the head; by default 2, of Medusa heads 1.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    length: Annotated[
        int,
        typer.Option(help="Tokens per beam to train for, root included.", rich_help_panel=NETWORK),
    ] = 5
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens that can be proposed, the most frequent ones; by default all.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Let a recurrent drafter read two more layers of the model.",
            rich_help_panel=NETWORK,
        ),
    ] = False
    layers_read: Annotated[
        str | None,
        typer.Option(
            metavar="1,3,-1",
            help="Layers of the model whose inputs a fused drafter, an EAGLE-3 head or a "
            "SpecFormer reads, -1 for the last hidden state; by default some from low to high.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights written.", rich_help_panel=NETWORK)
    ] = "float16"


@dataclass(frozen=True)
class Schedule:
    """The training."""

    recipe: Annotated[
        str,
        typer.Option(
            help="Objective: soft, the model's distributions; coupled, to sample as it does; "
            "apple, the text; rollouts, the model's greedy continuations.",
            rich_help_panel=TRAINING,
        ),
    ] = "soft"
    epochs: Annotated[int, typer.Option(help="Passes over the text.", rich_help_panel=TRAINING)] = 3
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Approximate time of the whole run, instead of --epochs: the model's writing and "
            "reading, training, evaluation.",
            show_default=False,
            rich_help_panel=TRAINING,
        ),
    ] = None
    batch_tokens: Annotated[
        int, typer.Option(help="Positions per step.", rich_help_panel=TRAINING)
    ] = 1024
    lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate; by default one for the drafter's width.",
            show_default=False,
            rich_help_panel=TRAINING,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(help="Random seed of texts, weights and order.", rich_help_panel=TRAINING),
    ] = 0

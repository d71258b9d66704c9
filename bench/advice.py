"""Advice on drafting for a model: usable drafters, the expected gain, and the cost of training.

`Subject` is the model and `Forecast` its expected speed; `advise` turns both into sentences.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_redrafter.bench.forecast import DrafterTrial, Forecast
from mlx_redrafter.bench.model_shape import EXAMPLE, ModelShape, shape_of_config, shape_of_family
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.recognition import is_word, recognise
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.proposers import redrafter
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.target_facts import check_sizes
from mlx_redrafter.training.data import CHARS_PER_TOKEN

# Minimum predicted speedup at which training a drafter is advised.
WORTH_TRAINING = 1.1
# Minimum measured speedup at which using an existing drafter is advised.
WORTH_USING = 1.03

Sections = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Subject:
    """The model that the advice is about, and a drafter that the user has.

    Attributes:
        name: Name for commands.
        shape: Its sizes.
        folder: Folder with its weights; None if they are not on this machine.
        is_bundled: Whether it is the bundled model.
        drafter: Name of the user's drafter; None without one.
        refusal: Reason why that drafter does not fit the model; None if it fits.
    """

    name: str
    shape: ModelShape
    folder: Path | None
    is_bundled: bool = False
    drafter: str | None = None
    refusal: str | None = None

    @property
    def usable_drafter(self) -> str | None:
        """The user's drafter, if it fits."""
        return self.drafter if self.refusal is None else None


def find_subject(model: str | None, drafter: str | None = None) -> Subject:
    """Find the model and check the drafter.

    Of a repository only the ``config.json`` is read.

    Args:
        model: A folder, a repository, or a family with a size; None is the bundled model.
        drafter: A folder, a repository, "lookup" or "mtp".

    Raises:
        CheckpointError: The model's config cannot be read.
        ConfigError: The model is neither a folder nor a repository nor a known family and size.
        UnsupportedTargetError: The model cannot be decoded exactly.
    """
    subject = _find_model(model)
    if drafter is None or is_word(drafter, "lookup"):
        return subject
    if is_word(drafter, "mtp"):
        return replace(subject, drafter=drafter)
    return replace(subject, drafter=drafter, refusal=_refuse(drafter, subject.shape))


def _find_model(model: str | None) -> Subject:
    if model is None:
        folder = find_bundled("target")
        shape = shape_of_config("the bundled model", read_config(folder))
        return Subject("", shape, folder, is_bundled=True)
    path = Path(model).expanduser()
    if path.is_dir():
        shape = shape_of_config(path.resolve().name, read_config(path))
        return Subject(model, shape, path if any(path.glob("model*.safetensors")) else None)
    if "/" not in model and not model.startswith((".", "~")):
        return Subject("MODEL", shape_of_family(model), None)
    try:
        config = read_config(find_checkpoint(model, CONFIG_ONLY))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; a family with a size, like {EXAMPLE}, needs no files"
        ) from error
    return Subject(model, shape_of_config(model, config), None)


def _refuse(drafter: str, shape: ModelShape) -> str | None:
    try:
        kind, config = recognise(drafter)
        if kind is redrafter:
            check_sizes(DrafterConfig.from_dict(config), shape.hidden_size, shape.vocab_size)
    except RedrafterError as error:
        return str(error)
    return None


def advise(
    subject: Subject,
    machine: str,
    forecast: Forecast,
    trial: DrafterTrial | None,
    cost: TrainingCost,
) -> Sections:
    """Write the advice: sentences by headline.

    Args:
        subject: The model.
        machine: Name of the machine.
        forecast: Expected speed on the machine.
        trial: Measurement of the user's drafter; None if it was not measured.
        cost: Cost of training a drafter.
    """
    return {
        "Model": [
            f"{subject.shape}.",
            "It is supported: with any drafter the output is the model's own, token for token.",
        ],
        "Drafters to use now": _drafters(subject),
        f"Expected speed on {machine}": _gains(forecast, trial),
        "Training a drafter": _training(subject, forecast, cost),
        "Recommended": _recommendation(subject, forecast, trial),
    }


def _drafters(subject: Subject) -> list[str]:
    sentences = [
        "lookup, the default: prompt lookup. It proposes the tokens that followed the newest "
        "words earlier in the text. It needs no files, and helps if a text repeats its prompt or "
        "itself.",
        "The bundled drafter, which was trained for this model."
        if subject.is_bundled
        else "Not the bundled drafter: it was trained for the bundled model.",
        "An EAGLE head or Medusa heads trained for this very model, with --drafter. If the model's "
        "own files hold an MTP module: --drafter mtp.",
        "A smaller model with the same token ids (draft model), with --drafter.",
    ]
    if subject.refusal is not None:
        sentences.append(f"Not {subject.drafter}: {subject.refusal}.")
    elif subject.drafter is not None:
        sentences.append(f"{subject.drafter}, which fits this model.")
    return sentences


def _gains(forecast: Forecast, trial: DrafterTrial | None) -> list[str]:
    sentences = [
        f"Plain decoding: {1 / forecast.plain:.0f} tokens/s, "
        f"{1e3 * forecast.plain:.1f} ms per step.",
        *forecast.notes,
        "With a recurrent drafter whose tokens per step equal those of Apple's for Vicuna-7B, "
        f"decoding would be at best {forecast.speedup:.2f} times as fast (shape {forecast.shape}).",
    ]
    if trial is not None:
        sentences.append(
            f"The drafter, measured on three short texts: {trial.speedup:.2f} times as fast as "
            f"plain decoding, {trial.tokens_per_step:.2f} tokens/step."
        )
    return sentences


def _training(subject: Subject, forecast: Forecast, cost: TrainingCost) -> list[str]:
    work, needed = cost.work, cost.needed
    tokens = work.given + work.generated
    memory = f"{format_bytes(needed.memory)} of memory"
    if subject.folder is not None and (total := read_total_memory()) is not None:
        memory += f" (this machine has {format_bytes(total)})"
    return [
        f"On {tokens:,} tokens: {forecast.training}.",
        f"Text: about {format_bytes(work.given * CHARS_PER_TOKEN)} that is like your use of the "
        "model; the model generates as much again.",
        f"Disk: {format_bytes(needed.disk)} during training, {format_bytes(needed.drafter)} for "
        f"the finished drafter; {memory}.",
        f"Command: {_training_command(subject, tokens)}",
        "With --dry-run the same command measures how long it will take on the machine it runs on.",
    ]


def _training_command(subject: Subject, tokens: int) -> str:
    model = shlex.quote(str(subject.folder) if subject.is_bundled else subject.name)
    return f"redrafter-mlx train --model {model} --data TEXTS --tokens {tokens} --out DRAFTER"


def _recommendation(subject: Subject, forecast: Forecast, trial: DrafterTrial | None) -> list[str]:
    name, drafter = map(shlex.quote, (subject.name, subject.usable_drafter or ""))
    use = "redrafter-mlx generate" + ("" if subject.is_bundled else f" --model {name}")
    if trial is not None and trial.speedup >= WORTH_USING:
        option = "" if subject.usable_drafter is None else f" --drafter {drafter}"
        return [
            f'Use the drafter: {use}{option} --prompt "..."',
            "Set no draft sizes: the program chooses them in every step.",
        ]
    sentences = [
        f"Use lookup, which decodes plainly if nothing repeats: {use} --drafter lookup "
        '--prompt "..."'
    ]
    if trial is not None:
        return [*sentences, "The drafter is not faster on this machine: leave it out."]
    if subject.usable_drafter is not None:
        sentences.append(
            f"Measure {subject.drafter} on the machine that will run it: give this command the "
            "model's folder there."
        )
    elif forecast.speedup >= WORTH_TRAINING:
        sentences.append("If you use the model for many hours, train a drafter for it.")
    else:
        sentences.append(
            "Do not train a drafter for this machine: a pass over several tokens is too slow on it."
        )
    return sentences

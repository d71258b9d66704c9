"""Advice on drafting for a model: what can draft for it, what that gives, and what training takes.

`Subject` is the model, `Outlook` what is expected of it; here they become plain sentences.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_redrafter.bench.model_shape import EXAMPLE, ModelShape, shape_of_config, shape_of_family
from mlx_redrafter.bench.outlook import Outlook, Trial
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.checkpoints.recognition import is_word, recognise
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.proposers import redrafter
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.target_facts import check_sizes
from mlx_redrafter.training.data import CHARS_PER_TOKEN
from mlx_redrafter.training.resources import format_bytes, read_total_memory

# Least gain that is worth training a drafter for, and least one of a drafter that is there.
WORTH_TRAINING, WORTH_USING = 1.1, 1.03

Sections = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Subject:
    """The model that advice is asked for.

    Attributes:
        name: Name for commands.
        shape: Its sizes.
        folder: Folder with its weights, None if they are not on this machine.
        is_bundled: Whether it is the bundled model.
        drafter: Name of a drafter at hand, None without one.
        refusal: Reason why that drafter cannot draft for it, None if nothing speaks against it.
    """

    name: str
    shape: ModelShape
    folder: Path | None
    is_bundled: bool = False
    drafter: str | None = None
    refusal: str | None = None

    @property
    def usable_drafter(self) -> str | None:
        """The drafter at hand if it fits."""
        return self.drafter if self.refusal is None else None


def find_subject(model: str | None, drafter: str | None = None) -> Subject:
    """The model that is meant, and a drafter at hand.

    Of repositories only the ``config.json`` is read.

    Args:
        model: A folder, a repository, or a family with a size; None is the bundled model.
        drafter: A folder, a repository, "lookup" or "mtp".

    Raises:
        CheckpointError: Its config cannot be read.
        ConfigError: It is neither a folder nor a repository nor a known family and size.
        UnsupportedTargetError: It cannot be decoded exactly.
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
    subject: Subject, machine: str, outlook: Outlook, trial: Trial | None, cost: TrainingCost
) -> Sections:
    """The advice, sentences by headline.

    Args:
        subject: The model.
        machine: Name of the machine.
        outlook: Expectations on the machine.
        trial: Texts decoded with the drafter at hand, None if it was not tried.
        cost: Cost of training a drafter.
    """
    return {
        "Model": [f"{subject.shape}.", "It is supported: its text stays its own, token for token."],
        "What can draft for it now": _drafters(subject),
        f"What drafting gives on {machine}": _gains(outlook, trial),
        "Training a drafter": _training(subject, outlook, cost),
        "Recommended": _recommendation(subject, outlook, trial),
    }


def _drafters(subject: Subject) -> list[str]:
    sentences = [
        "lookup (the default): what followed the newest words where they stood before. It needs "
        "nothing, and gains where a text repeats its prompt or itself.",
        "The bundled drafter, which was made for this model."
        if subject.is_bundled
        else "Not the bundled drafter: it belongs to the bundled model.",
        "An EAGLE head or Medusa heads made for this very model, as --drafter; --drafter mtp where "
        "its files hold an MTP module.",
        "A smaller model of the same token ids, as --drafter.",
    ]
    if subject.refusal is not None:
        sentences.append(f"Not {subject.drafter}: {subject.refusal}.")
    elif subject.drafter is not None:
        sentences.append(f"{subject.drafter}: it fits.")
    return sentences


def _gains(outlook: Outlook, trial: Trial | None) -> list[str]:
    sentences = [
        f"Plain decoding: {1 / outlook.plain:.0f} tokens/s, {1e3 * outlook.plain:.1f} ms per step.",
        *outlook.notes,
        "A recurrent drafter that gets the tokens per step of Apple's for Vicuna-7B would decode "
        f"{outlook.speedup:.2f} times as fast at best (shape {outlook.shape}).",
    ]
    if trial is not None:
        sentences.append(
            f"The drafter at hand, tried on three short texts: {trial.speedup:.2f} times as fast "
            f"as plain decoding, {trial.tokens_per_step:.2f} tokens/step."
        )
    return sentences


def _training(subject: Subject, outlook: Outlook, cost: TrainingCost) -> list[str]:
    work, needed = cost.work, cost.needed
    tokens = work.given + work.written
    memory = f"{format_bytes(needed.memory)} of memory"
    if subject.folder is not None and (total := read_total_memory()) is not None:
        memory += f" (there are {format_bytes(total)})"
    return [
        f"On {tokens:,} tokens: {outlook.training}.",
        f"Text: about {format_bytes(work.given * CHARS_PER_TOKEN)} of what you will use the model "
        "for; the model writes as much again itself.",
        f"Disk: {format_bytes(needed.disk)}, of which the drafter stays, "
        f"{format_bytes(needed.drafter)}; {memory}.",
        f"Command: {_training_command(subject, tokens)}",
        "With --dry-run the same command says how long it takes where it runs.",
    ]


def _training_command(subject: Subject, tokens: int) -> str:
    model = shlex.quote(str(subject.folder) if subject.is_bundled else subject.name)
    return f"redrafter-mlx train --model {model} --data TEXTS --tokens {tokens} --out DRAFTER"


def _recommendation(subject: Subject, outlook: Outlook, trial: Trial | None) -> list[str]:
    name, drafter = map(shlex.quote, (subject.name, subject.usable_drafter or ""))
    use = "redrafter-mlx generate" + ("" if subject.is_bundled else f" --model {name}")
    if trial is not None and trial.speedup >= WORTH_USING:
        option = "" if subject.usable_drafter is None else f" --drafter {drafter}"
        return [
            f'Use the drafter: {use}{option} --prompt "..."',
            "Leave the sizes of drafts to the program, which chooses them at every step.",
        ]
    sentences = [
        f"Use lookup, which decodes plainly where nothing repeats: {use} --drafter lookup "
        '--prompt "..."'
    ]
    if trial is not None:
        return [*sentences, "The drafter at hand gained nothing on this machine: leave it out."]
    if subject.usable_drafter is not None:
        sentences.append(
            f"Try {subject.drafter} where it will run: give this command the model's folder there."
        )
    elif outlook.speedup >= WORTH_TRAINING:
        sentences.append("If you use the model for many hours, train a drafter for it.")
    else:
        sentences.append(
            "Do not train a drafter for this machine: checking several tokens at once costs it too "
            "much."
        )
    return sentences

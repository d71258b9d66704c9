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
from mlx_redrafter.checkpoints.drafter_search import (
    DrafterSearch,
    FoundDrafter,
    describe_offer,
)
from mlx_redrafter.checkpoints.hub import Repository
from mlx_redrafter.checkpoints.identity import Identity
from mlx_redrafter.checkpoints.recognition import is_word, recognise
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.model_store import find_stored, is_complete
from mlx_redrafter.proposers import redrafter
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY, PATTERNS
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
    """The model that the advice is about, and a drafter for it.

    Attributes:
        name: Name for commands.
        shape: Its sizes.
        folder: Folder with its weights; None if they are not on this machine.
        is_bundled: Whether it is the bundled model.
        drafter: The user's drafter, or the one that was found on this machine; None without one.
        refusal: Reason why the user's drafter does not fit the model; None if it fits.
        found: The drafter that was found; None if the user named one.
        repository: Repository to download the found drafter from; None if it is on this machine.
        notes: Drafters that cannot be used, each with the reason.
    """

    name: str
    shape: ModelShape
    folder: Path | None
    is_bundled: bool = False
    drafter: str | None = None
    refusal: str | None = None
    found: FoundDrafter | None = None
    repository: Repository | None = None
    notes: Sequence[str] = ()

    @property
    def usable_drafter(self) -> str | None:
        """The drafter on this machine, if it fits."""
        return self.drafter if self.refusal is None else None

    @property
    def published_gain(self) -> str:
        """Gain that others measured with the found drafter; empty if none is known."""
        line = None if self.found is None else self.found.published
        return "" if line is None else line.gain


def find_subject(model: str | None, drafter: str | None = None) -> Subject:
    """Find the model, and check the drafter or find one.

    Of repositories only configs and descriptions are read.

    Args:
        model: A folder, a repository, or a family with a size; None is the bundled model.
        drafter: A folder, a repository, "lookup" or "mtp"; "auto" or None to find one.

    Raises:
        CheckpointError: The model's config cannot be read.
        ConfigError: The model is neither a folder nor a repository nor a known family and size.
        UnsupportedTargetError: The model cannot be decoded exactly.
    """
    subject, identity = _find_model(model)
    if drafter in (None, "auto"):
        return subject if identity is None else _find_drafter(subject, DrafterSearch(identity))
    if is_word(drafter, "lookup"):
        return subject
    if is_word(drafter, "mtp"):
        return replace(subject, drafter=drafter)
    return replace(subject, drafter=drafter, refusal=_refuse(str(drafter), subject.shape))


def _find_model(model: str | None) -> tuple[Subject, Identity | None]:
    """Find the model, and its identity unless it is the bundled one or known by family alone."""
    if model is None:
        folder = find_bundled("target")
        shape = shape_of_config("the bundled model", read_config(folder))
        return Subject("", shape, folder, is_bundled=True), None
    path = Path(model).expanduser()
    is_folder = path.is_dir()
    if not is_folder and "/" not in model and not model.startswith((".", "~")):
        if find_stored(model, CONFIG_ONLY) is None:
            return Subject("MODEL", shape_of_family(model), None), None
    try:
        path = path if is_folder else find_checkpoint(model, CONFIG_ONLY)
        identity = Identity.of_folder(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; a family with a size, like {EXAMPLE}, needs no files"
        ) from error
    shape = shape_of_config(path.resolve().name if is_folder else model, identity.config)
    has_weights = is_complete(path, None)
    subject = Subject(model, shape, path if has_weights else None)
    return subject, identity if has_weights else identity._replace(folder=None)


def _find_drafter(subject: Subject, search: DrafterSearch) -> Subject:
    """Find a drafter on this machine, or a published one."""
    found, repository, notes = search.stored(), None, search.skipped
    if found is None:
        try:
            offer = search.published()
            if offer is not None:
                found, repository = offer
        except CheckpointError as error:
            notes.append(str(error))
    found = found or search.draft_model()
    path = None if found is None or repository is not None else found.option
    return replace(subject, drafter=path, found=found, repository=repository, notes=notes)


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
        f"Expected speed on {machine}": _gains(subject, forecast, trial),
        "Training a drafter": _training(subject, forecast, cost),
        "Recommended": _recommendation(subject, forecast, trial),
    }


def _drafters(subject: Subject) -> list[str]:
    sentences = []
    if subject.repository is not None and subject.found is not None:
        sentences.append(f"To download: {describe_offer(subject.found, subject.repository)}.")
    elif subject.found is not None:
        found = subject.found
        sentences.append(f"On this machine: {found.name} ({found.method}; {found.reason}).")
    sentences += [
        "lookup, the default if no drafter for the model is on this machine: prompt lookup. It "
        "proposes the tokens that followed the newest words earlier in the text. It needs no "
        "files, and helps if a text repeats its prompt or itself.",
        "The bundled drafter, which was trained for this model."
        if subject.is_bundled
        else "Not the bundled drafter: it was trained for the bundled model.",
        "A head trained for this very model, with --drafter. If the model's own files hold an MTP "
        "module: --drafter mtp.",
        "A smaller model with the same token ids (draft model), with --drafter.",
    ]
    sentences += [f"Not used: {note}." for note in subject.notes]
    if subject.refusal is not None:
        sentences.append(f"Not {subject.drafter}: {subject.refusal}.")
    elif subject.drafter is not None and subject.found is None:
        sentences.append(f"{subject.drafter}, which fits this model.")
    return sentences


def _gains(subject: Subject, forecast: Forecast, trial: DrafterTrial | None) -> list[str]:
    sentences = [
        f"Plain decoding: {1 / forecast.plain:.0f} tokens/s, "
        f"{1e3 * forecast.plain:.1f} ms per step.",
        *forecast.notes,
        "With a recurrent drafter whose tokens per step equal those of Apple's for Vicuna-7B, "
        f"decoding would be at best {forecast.speedup:.2f} times as fast (shape {forecast.shape}).",
    ]
    if subject.found is not None and subject.published_gain:
        sentences.append(
            f"{subject.found.name}, measured by others: {subject.published_gain} times as fast as "
            "plain decoding."
        )
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


def recommended_command(subject: Subject, trial: DrafterTrial | None) -> str:
    """Return the command that decodes fastest, as far as that is known."""
    name, drafter = map(shlex.quote, (subject.name, subject.usable_drafter or ""))
    options = "" if subject.is_bundled else f" --model {name}"
    if trial is not None and trial.speedup >= WORTH_USING:
        is_default = subject.usable_drafter is None or subject.found is not None
        options += "" if is_default else f" --drafter {drafter}"
    elif subject.repository is not None:
        options += " --drafter auto --yes"
    else:
        options += " --drafter lookup"
    return f'redrafter-mlx generate{options} --prompt "..."'


def expected_gain(
    subject: Subject, forecast: Forecast, trial: DrafterTrial | None
) -> dict[str, object]:
    """Return the expected speed relative to plain decoding, and whose figure it is.

    Returns:
        Values by name: "speedup", a number or the text of those who measured it, and "source".
    """
    if trial is not None:
        return {"speedup": trial.speedup, "source": "measured on this machine"}
    if subject.published_gain:
        number, _, whose = subject.published_gain.partition(" (")
        return {"speedup": number, "source": whose.removesuffix(")")}
    source = "predicted for a recurrent drafter with Apple's tokens per step for Vicuna-7B"
    return {"speedup": forecast.speedup, "source": source}


def describe_drafter(subject: Subject) -> dict[str, object] | None:
    """Describe the drafter that the advice is about; None without one."""
    found, repository = subject.found, subject.repository
    if found is None:
        drafter = subject.usable_drafter
        return None if drafter is None else {"name": drafter, "stored": True}
    line = found.published
    stated = "" if repository is None else repository.card.licence
    return {
        "name": found.name,
        "method": found.method,
        "reason": found.reason,
        "stored": repository is None,
        "bytes": None if repository is None else repository.size(PATTERNS),
        "licence": stated or ("" if line is None else line.licence) or None,
    }


def _recommendation(subject: Subject, forecast: Forecast, trial: DrafterTrial | None) -> list[str]:
    command = recommended_command(subject, trial)
    if trial is not None and trial.speedup >= WORTH_USING:
        sizes = "Set no draft sizes: the program chooses them in every step."
        return [f"Use the drafter: {command}", sizes]
    if trial is None and subject.repository is not None:
        return [f"Download the drafter and use it: {command}"]
    sentences = [f"Use lookup, which decodes plainly if nothing repeats: {command}"]
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

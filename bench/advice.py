"""Advice on drafting for a model: usable drafters, the expected gain, and the cost of training.

`Subject` is the model and `Forecast` its expected speed; `recommend` chooses the command to use.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.chips import Chip
from mlx_redrafter.bench.forecast import THIS_MACHINE, Forecast, SimulatedDrafter
from mlx_redrafter.bench.model_shape import ModelShape, shape_of_config
from mlx_redrafter.bench.smaller_copy import advise_copy, find_copy
from mlx_redrafter.checkpoint_files import expand_home, find_checkpoint, read_config
from mlx_redrafter.checkpoints.bundled import expand_name, find_bundled
from mlx_redrafter.checkpoints.drafter_search import (
    DrafterSearch,
    FoundDrafter,
    can_draft,
    describe_offer,
)
from mlx_redrafter.checkpoints.identity import Identity
from mlx_redrafter.checkpoints.recognition import is_word, recognise
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.hub import Repository
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.model_store import is_complete
from mlx_redrafter.proposers import WORDS, draft_model, redrafter
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY, PATTERNS
from mlx_redrafter.proposers.kind import TargetFacts
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.training.data import CHARS_PER_TOKEN

# Minimum predicted speedup at which training a drafter is advised.
WORTH_TRAINING = 1.1
# Minimum measured speedup at which using an existing drafter is advised.
WORTH_USING = 1.03
# Share of a mixture's parameters that a token reads, below which drafts cost much.
FEW_ACTIVE = 0.25


@dataclass(frozen=True)
class Subject:
    """The model that the advice is about, and a drafter for it."""

    name: str
    shape: ModelShape
    folder: Path | None  # folder with its weights; None if they are not on this machine
    is_bundled: bool = False
    drafter: str | None = None  # the user's, or the one found on this machine; None without one
    refusal: str | None = None  # why the user's drafter does not fit the model; None if it fits
    found: FoundDrafter | None = None  # the drafter that was found; None if the user named one
    repository: Repository | None = None  # to download that from; None if it is on this machine
    notes: Sequence[str] = ()  # drafters that cannot be used, each with the reason
    can_draft: bool = False  # whether it attends to all tokens, so that a copy of it could draft

    @property
    def usable_drafter(self) -> str | None:
        """The drafter on this machine, if it fits."""
        return self.drafter if self.refusal is None else None

    @property
    def has_drafter(self) -> bool:
        """True if there is a drafter to use, on this machine or to download."""
        return self.usable_drafter is not None or self.repository is not None

    @cached_property
    def simulated(self) -> SimulatedDrafter | None:
        """The drafter on this machine, if its config states its tokens per step."""
        folder = None if self.usable_drafter is None else Path(self.usable_drafter)
        return None if folder is None or not folder.is_dir() else SimulatedDrafter.of(folder)

    @property
    def has_bundled_drafter(self) -> bool:
        return self.is_bundled and self.drafter == str(find_bundled("drafter"))


def find_subject(
    model: str | None, drafter: str | None = None, chip: Chip | None = None
) -> Subject:
    """Find the model, and check the drafter or find one.

    Of repositories only configs and descriptions are read. The model None is the bundled one, and
    the drafters None and "auto" stand for one to find. A copy of the model must pay on ``chip`` as
    its drafter; None finds no copies.
    """
    subject, identity = _find_model(model)
    drafter = None if drafter is None else expand_name(drafter)
    if drafter in (None, "auto"):
        if identity is None:
            return subject
        return _find_drafter(subject, DrafterSearch(identity), chip)
    if is_word(drafter, "lookup"):
        return replace(subject, drafter=None)
    if any(is_word(drafter, word) for word in WORDS):
        return replace(subject, drafter=drafter)
    return replace(subject, drafter=drafter, refusal=_refuse(str(drafter), subject))


def _find_model(model: str | None) -> tuple[Subject, Identity | None]:
    """Find the model, with its identity unless it is the bundled one."""
    if model is None:
        folder = find_bundled("target")
        shape = shape_of_config("the bundled model", read_config(folder))
        # It is stored in 16 bits and computed with in 32.
        shape, drafter = replace(shape, bits=32), str(find_bundled("drafter"))
        return Subject("", shape, folder, is_bundled=True, drafter=drafter), None
    path = find_checkpoint(model, CONFIG_ONLY)
    identity = Identity.of_folder(path)
    is_folder = expand_home(model).is_dir()
    shape = shape_of_config(path.resolve().name if is_folder else model, identity.config)
    has_weights = is_complete(path, None)
    able = can_draft(model, identity.config)
    subject = Subject(model, shape, path if has_weights else None, can_draft=able)
    return subject, identity if has_weights else identity._replace(folder=None)


def _find_drafter(subject: Subject, search: DrafterSearch, chip: Chip | None) -> Subject:
    found, repository, failures = search.stored(), None, []
    if found is None:
        try:
            found, repository = search.published() or (None, None)
        except CheckpointError as error:
            failures.append(str(error))
    found = found or search.draft_model() or find_copy(search, chip)
    path = None if found is None or repository is not None else found.option
    notes = [*search.reasons, *failures]
    return replace(subject, drafter=path, found=found, repository=repository, notes=notes)


def _refuse(drafter: str, subject: Subject) -> str | None:
    try:
        kind, config = recognise(drafter, subject.name)
        if kind is redrafter:
            facts = TargetFacts(None, subject.shape.hidden_size, subject.shape.vocab_size)
            facts.check(DrafterConfig.from_dict(config))
    except RedrafterError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Recommendation:
    """The command to use for a model, and the reasons."""

    command: str
    # Speed by that of plain decoding: a number, the words of who measured it, or None.
    speedup: float | str | None
    source: str  # whose figure that is, or why there is none
    reasons: Sequence[str]
    limits: Sequence[str]  # sentences that say when drafting will not pay

    @property
    def gain(self) -> str:
        if self.speedup is None:
            return f"Gain: unknown; {self.source}."
        number = self.speedup if isinstance(self.speedup, str) else f"{self.speedup:.2f}"
        return f"Gain: {number} times as fast as plain decoding; {self.source}."


def recommend(subject: Subject, forecast: Forecast, trial: float | None) -> Recommendation:
    """Choose the command that decodes fastest, as far as that is known.

    ``trial`` is the measured speed of the drafter on this machine relative to plain decoding, or of
    prompt lookup without one; None if nothing was measured.
    """
    options, speedup, source, reasons = _choose(subject, trial, forecast.gain)
    model = "" if subject.is_bundled else f" --model {shlex.quote(subject.name)}"
    if subject.refusal is not None:
        reasons.append(f"{subject.drafter} cannot draft for this model: {subject.refusal}.")
    reasons += [f"Not used: {note}." for note in subject.notes]
    command = f'redrafter-mlx generate{model}{options} --prompt "..."'
    return Recommendation(command, speedup, source, reasons, _limits(subject.shape, forecast))


def summarise(subject: Subject, forecast: Forecast, recommended: Recommendation) -> dict[str, Any]:
    """Return the advice as JSON values."""
    return {
        "supported": True,
        "machine": forecast.machine,
        "drafter": describe_drafter(subject),
        "command": recommended.command,
        "gain": {"speedup": recommended.speedup, "source": recommended.source},
        "limits": recommended.limits,
        "training": {
            "seconds": None if forecast.training is None else forecast.training.total,
            "speedup": forecast.speedup,
            "command": training_command(subject, forecast.cost.tokens),
        },
    }


def _choose(
    subject: Subject, trial: float | None, predicted: float | None
) -> tuple[str, float | str | None, str, list[str]]:
    """Choose a drafter: its option, the gain, the gain's source, and the reasons."""
    found, measured = subject.found, "measured here on three short texts"
    if found is not None and subject.repository is not None:
        offer = describe_offer(found, subject.repository)
        return " --drafter auto --yes", *_published_gain(subject), [f"It downloads {offer}."]
    if subject.usable_drafter is not None and (trial is None or trial >= WORTH_USING):
        was_made = found is not None and found.method != draft_model.NAME
        is_default = was_made or subject.has_bundled_drafter
        named = "" if is_default else f" --drafter {shlex.quote(subject.usable_drafter)}"
        where = subject.usable_drafter if found is None else f"{found.name} ({found.reason})"
        where = "the one in this package" if subject.has_bundled_drafter else where
        reasons = [f"The drafter is on this machine: {where}."]
        if trial is not None:
            return named, trial, measured, reasons
        if predicted is not None:
            return named, *_predicted_gain(subject, predicted), reasons
        return named, *_published_gain(subject), reasons
    reasons = ["Prompt lookup proposes what followed the newest words earlier in the text."]
    if subject.usable_drafter is not None:
        name = "The bundled drafter" if subject.has_bundled_drafter else subject.usable_drafter
        reasons.insert(0, f"{name} is {trial:.2f} times as fast here: leave it out.")
        trial = None  # that of the drafter, not of the lookup
    source = "it depends on how much a text repeats" if trial is None else measured
    return " --drafter lookup", trial, source, reasons


def _predicted_gain(subject: Subject, predicted: float) -> tuple[float, str]:
    """Return the gain that is predicted with the drafter on this machine, and from what."""
    if predicted >= WORTH_USING:
        return predicted, f"predicted for {subject.simulated}"
    slow = f"{subject.simulated} would be {predicted:.2f} times as fast"
    return 1.0, f"predicted, as {slow}: the program decodes plainly"


def _published_gain(subject: Subject) -> tuple[str | None, str]:
    """Return the gain that others measured with the found drafter, and who they are."""
    line = None if subject.found is None else subject.found.published
    if line is None or not line.gain:
        return None, "nobody has published one; `redrafter-mlx try` measures it"
    number, _, whose = line.gain.partition(" (")
    return number, f"measured by others ({whose.removesuffix(')')})"


def _limits(shape: ModelShape, forecast: Forecast) -> list[str]:
    limits = []
    if shape.active < FEW_ACTIVE * shape.parameters:
        limits.append(
            "A token reads few of this model's experts, and every draft reads others: on an M4 Pro "
            "mlx-dspark's authors measured gains of 1.1 to 1.7 for such models in 4 bits."
        )
    if forecast.is_narrow:
        limits.append(
            f"M1 and M2 read weights in {shape.bits} bits once per draft with MLX's own kernels, "
            "so drafting pays only if this package's kernels pass their trial: "
            "redrafter-mlx check --kernels."
        )
    return [
        *limits,
        "At high temperatures, in large batches and in texts that surprise the drafter, drafting "
        "gains little; the program then decodes plainly.",
    ]


def advise(
    subject: Subject, forecast: Forecast, recommended: Recommendation, chip: Chip | None = None
) -> dict[str, Sequence[str]]:
    """Write the advice, sentences by headline; ``chip`` is None if no figures are known for it."""
    sections: dict[str, Sequence[str]] = {
        "Recommended": [recommended.command, recommended.gain, *recommended.reasons],
        "When drafting will not pay": recommended.limits,
    }
    if not subject.has_drafter:
        sections["No drafter was found: training one"] = _training(subject, forecast)
        if subject.can_draft:
            advice = advise_copy(subject.name, subject.shape, chip)
            sections["A smaller copy of the model as its drafter"] = advice
    sections["Model"] = [f"{subject.shape}. It is supported: the text is the model's own."]
    outlook = [_outlook(forecast)] if subject.usable_drafter is None else []
    plain = f"{1 / forecast.plain:.0f} tokens/s, {1e3 * forecast.plain:.1f} ms per step"
    notes = [f"Plain decoding: {plain}.", *forecast.notes, *outlook]
    sections[f"Forecast for {forecast.machine}"] = notes
    return sections


def _outlook(forecast: Forecast) -> str:
    found = "not become faster: its steps are too short"
    if forecast.speedup > 1:
        found = f"be at best {forecast.speedup:.2f} times as fast (shape {forecast.shape})"
    return (
        "With a recurrent drafter whose tokens per step equal those of Apple's for Vicuna-7B, "
        f"decoding would {found}."
    )


def _training(subject: Subject, forecast: Forecast) -> list[str]:
    machine, cost = forecast.machine, forecast.cost
    work, needed, tokens = cost.work, cost.needed, cost.tokens
    memory = f"{format_bytes(needed.memory)} of memory"
    if machine == THIS_MACHINE and (total := read_total_memory()) is not None:
        memory += f" (this machine has {format_bytes(total)})"
    if forecast.speedup < WORTH_TRAINING:
        advice = f"Do not train one for {machine}: drafting costs about as much time as it saves."
    else:
        advice = "Train one if you use the model for many hours."
    time = f"On {tokens:,} tokens: {forecast.training}."
    return [
        advice if forecast.training is None else f"{advice} {time}",
        f"Text: about {format_bytes(work.given * CHARS_PER_TOKEN)} that is like your use of the "
        "model; the model generates as much again.",
        f"Disk: {format_bytes(needed.disk)} during training, {format_bytes(needed.drafter)} for "
        f"the finished drafter; {memory}.",
        f"Command: {training_command(subject, tokens)} (with --dry-run it measures how long it "
        "will take)",
    ]


def training_command(subject: Subject, tokens: int) -> str:
    model = shlex.quote(str(subject.folder) if subject.is_bundled else subject.name)
    return f"redrafter-mlx train --model {model} --data TEXTS --tokens {tokens} --out DRAFTER"


def describe_drafter(subject: Subject) -> dict[str, object] | None:
    """Describe the drafter that the advice is about; None without one."""
    found, repository = subject.found, subject.repository
    if found is None:
        drafter = subject.usable_drafter
        return None if drafter is None else {"name": drafter, "stored": True}
    line = found.published
    stated = "" if repository is None else repository.licence
    return {
        "name": found.name,
        "method": found.method,
        "reason": found.reason,
        "stored": repository is None,
        "bytes": None if repository is None else repository.size(PATTERNS),
        "licence": stated or ("" if line is None else line.licence) or None,
    }

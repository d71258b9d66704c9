"""Search for a drafter of a model: on this machine, and in the table of published drafters.

A drafter counts as made for a model if the table, its config or its card names the model, and if
neither its config nor its tensors contradict that. Nothing is downloaded but a config.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.checkpoint_files import has_weights, read_config, read_shapes, weight_files
from mlx_redrafter.checkpoints.bundled import bundled_drafters
from mlx_redrafter.checkpoints.cards import read_card
from mlx_redrafter.checkpoints.identity import Identity, has_same_tokens, targets_in_config
from mlx_redrafter.checkpoints.recognition import is_word, recognise
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.hub import Repository, describe_repository
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.model_store import find_stored, is_complete, repository_of, stored_models
from mlx_redrafter.proposers import draft_model, mtp
from mlx_redrafter.proposers.checkpoint import PATTERNS
from mlx_redrafter.proposers.mtp.families import has_family, is_sidecar, prefix_of
from mlx_redrafter.target.model_loading import find_model, make_model

MAX_REASONS = 3
# Table of drafters that others have published: tab-separated, with a line of headings.
TABLE = Path(__file__).with_name("drafters.tsv")
# Names of methods for messages.
METHODS = {
    "assistant": "Gemma 4 assistant",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "eagle3": "EAGLE-3",
}
# Word for a drafter that is found by the model's name.
AUTO = "auto"
# Maximum size of a draft model, in sizes of the target; a larger one costs more than it gains.
MAX_SHARE = 0.2


class PublishedDrafter(NamedTuple):
    """A line of the table: the repositories of a model and of a drafter for it.

    ``method`` is a key of `METHODS`. ``licence`` is empty if the sources do not state it, and
    ``gain``, the speed relative to plain decoding and whose figure it is, if it is unknown.
    ``source`` names the texts that name the pair.
    """

    target: str
    drafter: str
    method: str
    licence: str
    gain: str
    source: str


class FoundDrafter(NamedTuple):
    """A drafter for a model, and the ``reason`` to think that it was made for the model.

    ``name`` is that of a repository or folder, for messages; `load` accepts ``path``. ``method`` is
    its kind, and ``published`` its line in the table, if it is there.
    """

    name: str
    path: str
    method: str
    reason: str
    published: PublishedDrafter | None = None

    @property
    def option(self) -> str:
        """Value for ``--drafter``: a repository, a folder or a word."""
        return self.name if "/" in self.name else self.path


@dataclass
class DrafterSearch:
    """Drafters of one model; ``skipped`` has those that cannot be used, each with the reason."""

    model: Identity
    skipped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: str) -> Self:
        """Search for a model, a folder or a repository, which is downloaded if it is not here.

        Raise `CheckpointError` if the model's files cannot be found or read, and
        `UnsupportedTargetError` if the model cannot be decoded exactly.
        """
        return cls(Identity.of_folder(find_model(model)))

    @property
    def reasons(self) -> list[str]:
        """The first reasons why drafters cannot be used, and the number of the others."""
        hidden = len(self.skipped) - MAX_REASONS
        more = [f"{hidden} more published drafters"] if hidden > 0 else []
        return self.skipped[:MAX_REASONS] + more

    def stored(self) -> FoundDrafter | None:
        """Find a drafter on this machine that was made for the model, without the network."""
        return next(filter(None, map(self._usable, self._stored())), None)

    def published(self) -> tuple[FoundDrafter, Repository] | None:
        """Find a published drafter that is not on this machine; fetch its config alone.

        Raise `CheckpointError` if the hub cannot be reached.
        """
        for line in published_for(self.model):
            if find_stored(line.drafter, PATTERNS) is not None:
                continue
            repository = describe_repository(line.drafter)
            if repository is None:
                self.skipped.append(f"{line.drafter} is no longer on the hub")
            elif (found := self._usable(_of_table(line, line.drafter))) is not None:
                return found, repository
            elif repository.is_gated:
                self.skipped[-1] += f"; accept its terms at {repository.address} first"
        return None

    def draft_model(self) -> FoundDrafter | None:
        """Find the smallest model on this machine that has the tokens of the model."""
        folder = self.model.folder
        if folder is None:
            return None
        limit = MAX_SHARE * _weight_bytes(folder)
        smaller = [one for one in stored_models() if _weight_bytes(one.folder) <= limit]
        for one in sorted(smaller, key=lambda one: _weight_bytes(one.folder)):
            if _is_model(one.folder, attends_to_all=True) and has_same_tokens(one.folder, folder):
                reason = "it has the tokens of the model"
                return FoundDrafter(one.name, str(one.folder), draft_model.NAME, reason)
        return None

    def copies(self) -> Iterator[FoundDrafter]:
        """Yield the copies of the model on this machine that have fewer bytes and can draft."""
        model = self.model.folder
        if model is None:
            return
        most = _weight_bytes(model)
        for folder in self._folders():
            is_smaller = is_complete(folder, None) and _weight_bytes(folder) < most
            if is_smaller and self._is_copy(folder, model):
                yield FoundDrafter(
                    repository_of(folder), str(folder), draft_model.NAME, "a copy of the model"
                )

    def _is_copy(self, folder: Path, model: Path) -> bool:
        """Return whether a folder has the model's name, sizes and tokens, and can draft."""
        try:
            other = Identity.of_folder(folder)
        except RedrafterError:
            return False
        sizes = {**other.config, "num_target_layers": other.config.get("num_hidden_layers")}
        return (
            self.model.is_named(*other.names)
            and self.model.contradiction(sizes) is None
            and _is_model(folder, attends_to_all=True)
            and has_same_tokens(folder, model)
        )

    def _stored(self) -> Iterator[FoundDrafter]:
        for line in published_for(self.model):
            folder = find_stored(line.drafter, PATTERNS)
            if folder is not None:
                yield _of_table(line, str(folder))
        for folder in self._folders():
            if (reason := self._declaration(folder)) is not None:
                yield FoundDrafter(repository_of(folder), str(folder), "", reason)
        folder, config = self.model.folder, self.model.config
        if folder is not None and has_family(config) and not is_sidecar(config):
            prefix = prefix_of(config)
            if any(name.startswith(prefix) for name in read_shapes(folder)):
                reason = "it is in the model's own files"
                yield FoundDrafter(mtp.WORD, mtp.WORD, mtp.NAME, reason)

    def _folders(self) -> Iterator[Path]:
        """Yield the folders that may hold a drafter: in the stores, beside, and bundled ones."""
        yield from (one.folder for one in stored_models())
        if self.model.folder is not None:
            beside = self.model.folder.resolve().parent.glob("*/config.json")
            yield from (config.parent for config in sorted(beside))
        yield from bundled_drafters()

    def _declaration(self, folder: Path) -> str | None:
        """Return the text in a drafter's config or card that names the model."""
        try:
            config = read_config(folder)
            named = targets_in_config(config)
            if self.model.is_named(*named):
                return f"its config names {named[0]}"
            bases = read_card(folder).base_models
            if not named and self.model.is_named(*bases) and not _is_model(folder):
                return f"its card names {bases[0]}"
        except RedrafterError:
            pass  # a damaged folder of another program is no drafter
        return None

    def _usable(self, found: FoundDrafter) -> FoundDrafter | None:
        """Return the drafter with its kind if it is supported and fits; note the reason if not."""
        if found.path == mtp.WORD:
            return found
        try:
            kind, config = recognise(found.path)
            if (reason := self.model.contradiction(config)) is None:
                return found._replace(method=found.method or kind.NAME)
            refusal = f"{found.name} is not for this model: {reason}"
        except RedrafterError as error:
            refusal = str(error)
        self.skipped.append(refusal)
        return None


@cache
def read_table() -> tuple[PublishedDrafter, ...]:
    """Read the table; of one target, the preferred drafter comes first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return tuple(PublishedDrafter(*row) for row in rows[1:])


def published_for(model: Identity) -> list[PublishedDrafter]:
    """Return the published drafters of a model, the preferred one first."""
    return [line for line in read_table() if model.is_named(line.target)]


def is_auto(drafter: str | Path | None) -> bool:
    """Return whether a drafter's name is `AUTO`; raise `ConfigError` if it is a folder as well."""
    return is_word(drafter, AUTO, "lets the program choose a drafter")


def can_draft(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model attends to all tokens: it has no windows or states.

    Raise `CheckpointError` or `UnsupportedTargetError` if mlx-lm cannot make the model.
    """
    return all(type(cache) is KVCache for cache in make_prompt_cache(make_model(name, config)))


def describe_offer(found: FoundDrafter, repository: Repository) -> str:
    """Describe a download: its kind, size and licence, and the gain that others measured."""
    line = found.published
    stated = repository.licence or (line.licence if line is not None else "")
    licence = f"licence {stated}" if stated else "no licence stated"
    size = format_bytes(repository.size(PATTERNS))
    gain = f"; speed relative to plain decoding {line.gain}" if line and line.gain else ""
    return f"{found.name} ({found.method}, {size}, {licence}; {found.reason}{gain})"


def _of_table(line: PublishedDrafter, path: str) -> FoundDrafter:
    reason = f"made for {line.target}, says {line.source}"
    return FoundDrafter(line.drafter, path, METHODS[line.method], reason, line)


def _is_model(folder: Path, attends_to_all: bool = False) -> bool:
    """Return whether a folder holds a model, not a drafter; one without windows or states."""
    try:
        kind, config = recognise(folder)
        return kind is draft_model and (not attends_to_all or can_draft(folder.name, config))
    except RedrafterError:
        return False


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder)) if has_weights(folder) else 0

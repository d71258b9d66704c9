"""State that an engine carries from text to text, and on disk to the next process.

The file of the estimates lies next to the step times. It holds numbers and no text.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters, write_text
from mlx_redrafter.engine.stored_costs import Known
from mlx_redrafter.measured import DAMAGED, cache_folder, fingerprint
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.target.compiled_pass import CompiledPasses

logger = logging.getLogger(__name__)

# Form of the file; files of other forms are not found.
FORM = 3
# Maximum size of a file, in bytes; it has some 5 kB for each number of slots.
MOST_BYTES = 1_000_000

# Estimates of the last text, and of batches by number of slots.
Estimates = tuple[PolicyState | None, dict[int, PolicyState]]


class StateFile:
    """File of the estimates for a model and a drafter on this machine.

    ``networks`` are the model and those of the drafter; ``kind`` names a drafter without networks.
    """

    def __init__(self, networks: Sequence[nn.Module], kind: str = ""):
        folder = cache_folder()
        name = fingerprint(("state", FORM, kind, _digest(networks)), networks)
        self._path = folder and folder / f"{name}.state"
        # Number of texts so far, and at the next time that the file is written.
        self._num_texts, self._next = 0, 1

    def read(self) -> Estimates:
        """Return the estimates of the file; none if it is missing or damaged."""
        try:
            if self._path is None or self._path.stat().st_size > MOST_BYTES:
                return None, {}
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            policy = stored["policy"] and PolicyState.restored(stored["policy"])
            batches = {  # without the costs of plain steps, which batches time again
                int(size): replace(PolicyState.restored(one), guard=None)
                for size, one in stored["batches"].items()
            }
        except DAMAGED:
            return None, {}
        return policy or None, batches

    def count_text(self, policy: PolicyState | None, batches: Mapping[int, PolicyState]) -> None:
        """Count a text, and write the estimates whenever the number of texts has doubled."""
        self._num_texts += 1
        if self._path is None or self._num_texts < self._next:
            return
        self._next = 2 * self._num_texts
        stored = {
            "policy": policy and policy.stored(),
            "batches": {str(size): one.stored() for size, one in dict(batches).items()},
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(stored, allow_nan=False))
        except (OSError, ValueError) as error:
            logger.info("estimates are not kept for the next run: %s", error)


def _digest(networks: Sequence[nn.Module]) -> str:
    """Return a digest of some weights of every tensor: models of one form have other ones."""
    found: dict[Any, list[mx.array]] = {}
    for network in networks:
        for tensor in named_parameters(network).values():
            if tensor.ndim:
                found.setdefault(tensor.dtype, []).append(tensor[(0,) * (tensor.ndim - 1)][:16])
    digest = hashlib.sha256()
    for arrays in found.values():
        digest.update(np.array(mx.concatenate(arrays).view(mx.uint8)).tobytes())
    return digest.hexdigest()


@dataclass
class LearnedState:
    """Measurements and estimates for a target and a proposer, carried from text to text.

    Attributes:
        lookup: Prompt lookup, whose acceptance rates all texts share.
        policy: Estimates of the last text with an adaptive policy, for the next one.
        batches: The same for batches, by number of slots.
        timed: Step times measured so far, or read from the file of an earlier run.
        passes: Compiled passes of the target; None without any.
        file: File of the estimates; None before the first text that may need them.
    """

    lookup: Lookup = field(default_factory=Lookup)
    policy: PolicyState | None = None
    batches: dict[int, PolicyState] = field(default_factory=dict)
    timed: Known = field(default_factory=dict)
    passes: CompiledPasses | None = None
    file: StateFile | None = None

    def recall(self, networks: Sequence[nn.Module], kind: str) -> None:
        """Begin, once, with the estimates that an earlier process has stored; see `StateFile`."""
        if self.file is None:
            self.file = StateFile(networks, kind)
            policy, batches = self.file.read()
            self.policy = self.policy or policy
            self.batches.update({size: batches[size] for size in batches.keys() - self.batches})

    def keep(self) -> None:
        """Let a later process begin with the estimates of a text that has ended."""
        if self.file is not None:
            self.file.count_text(self.policy, self.batches)

"""A result file that grows while runs are made, so that an interrupted benchmark can go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.result_file import new_result, read_result, write_result
from mlx_redrafter.bench.runs import Run
from mlx_redrafter.errors import ConfigError

# Parts of a result that must be the same for a benchmark to go on.
FIXED = ("configuration", "versions")


class Recording:
    """The runs of a benchmark, kept in a file after every turn.

    Attributes:
        result: Content of the file except the runs; results are to be added to it.
        runs: All runs so far.
    """

    def __init__(
        self, path: Path | None, kind: str, configuration: Mapping[str, Any], resume: bool = False
    ):
        """Start a recording, or go on with the one in the file.

        Args:
            path: The file, None for no file.
            kind: The benchmark's name.
            configuration: Settings of the benchmark, of types that JSON has.
            resume: Whether to go on with the file, if there is one.

        Raises:
            ConfigError: The file exists and is not to be resumed, or has other settings.
        """
        self.path = path
        self.runs: list[Run] = []
        self.result = new_result(kind, configuration)
        self._watch = LoadWatch()
        self._sitting = {key: self.result[key] for key in ("measured_at", "machine", "commit")}
        self.result["sittings"] = [self._sitting]
        if path is not None and path.exists():
            if not resume:
                raise ConfigError(f"{path} exists; go on with --resume, or choose another file")
            self._continue(path, kind)
        self._done = {run.turn for run in self.runs}

    def has(self, turn: tuple[str, int, str, int]) -> bool:
        """Whether there are the runs of a turn."""
        return turn in self._done

    def add(self, runs: Iterable[Run]) -> None:
        """Keep the runs of a turn, all of them."""
        self.runs.extend(runs)
        self._done.update(run.turn for run in self.runs)
        self._sitting["load_of_others"] = self._watch.others()
        self.write()

    def finish(self, **found: Any) -> None:
        """Add the results, and what may have disturbed the times; write the file."""
        loads = (sitting.get("load_of_others") for sitting in self.result["sittings"])
        load = max((load for load in loads if load is not None), default=None)
        self.result |= {**found, "disturbances": find_disturbances(load, self.runs)}
        self.write()

    def write(self) -> None:
        """Write the file."""
        if self.path is not None:
            write_result(self.path, {**self.result, "runs": [asdict(run) for run in self.runs]})

    def _continue(self, path: Path, kind: str) -> None:
        before = read_result(path, kind)
        for key in FIXED:
            found, expected = before[key], self.result[key]
            different = [name for name in expected if found.get(name) != expected[name]]
            if different:
                name = different[0]
                raise ConfigError(
                    f"{path} was measured with {name} {found.get(name)!r}, now it is "
                    f"{expected[name]!r}; resume with the same settings or choose another file"
                )
        self.runs = [Run(**values) for values in before.pop("runs")]
        self.result = {**before, "sittings": [*before["sittings"], self._sitting]}

"""A result file that grows with every run, so that an interrupted benchmark can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.result_file import new_result, read_result, write_result
from mlx_redrafter.bench.runs import TimedRun
from mlx_redrafter.destinations import check_writable
from mlx_redrafter.errors import CheckpointError, ConfigError

# Parts of a result that must be equal for a benchmark to be resumed, () for all of a part.
FIXED: Mapping[str, tuple[str, ...]] = {
    "configuration": (),
    "versions": (),
    "machine": ("processor", "cores", "device"),
}


class Recording:
    """The runs of a benchmark, kept in a file after every turn.

    ``result`` is the content of the file except the ``runs``; the benchmark adds its results.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        configuration: Mapping[str, Any],
        resume: bool = False,
        overwrite: bool = False,
    ):
        """Start a recording, or resume the one in the file.

        ``configuration`` consists of JSON values. Without a path no file is written. Raise
        `CheckpointError` if the file is damaged, `ConfigError` if it exists or is to be resumed
        with other settings, and `OSError` if its folder takes no file.
        """
        self.path = path
        self.runs: list[TimedRun] = []
        self.result = new_result(kind, configuration)
        self._watch = LoadWatch()
        self._sitting = {key: self.result[key] for key in ("measured_at", "machine", "commit")}
        self.result["sittings"] = [self._sitting]
        if path is not None and path.exists():
            if resume:
                self._continue(path, kind)
            elif not overwrite:
                raise ConfigError(f"{path} exists; resume it with --resume, or choose another file")
        if path is not None:
            check_writable(path)  # before the runs
        self._done = {run.turn for run in self.runs}

    def has(self, turn: tuple[str, int, str, int]) -> bool:
        return turn in self._done

    def add(self, runs: Iterable[TimedRun]) -> None:
        """Record all runs of a turn and write the file."""
        self.runs.extend(runs)
        self._done.update(run.turn for run in self.runs)
        self._sitting["load_of_others"] = self._watch.others()
        self.write()

    def finish(self, has_servers: bool = False, **found: Any) -> None:
        """Add the results and the signs of disturbed times, and write the file.

        The load of servers that worked for the benchmark is no such sign.
        """
        loads = (sitting.get("load_of_others") for sitting in self.result["sittings"])
        load = max((load for load in loads if load is not None), default=None)
        load = None if has_servers else load
        self.result |= {**found, "disturbances": find_disturbances(load, self.runs)}
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_result(self.path, {**self.result, "runs": [asdict(run) for run in self.runs]})

    def _continue(self, path: Path, kind: str) -> None:
        before, names = read_result(path, kind), {field.name for field in fields(TimedRun)}
        try:
            for key, fixed in FIXED.items():
                found, expected = before[key], self.result[key]
                compared = fixed or expected
                different = [name for name in compared if found.get(name) != expected[name]]
                if different:
                    name = different[0]
                    raise ConfigError(
                        f"{path} was measured with {name} {found.get(name)!r}, now it is "
                        f"{expected[name]!r}; resume with the same settings or choose another file"
                    )
            runs, sittings = before.pop("runs"), [*before["sittings"], self._sitting]
            is_known = all(set(values) == names for values in runs)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); choose another file") from error
        if not is_known:
            raise ConfigError(f"{path} is of another version of this program; choose another file")
        self.runs = [TimedRun(**values) for values in runs]
        self.result = {**before, "sittings": sittings}

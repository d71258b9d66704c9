"""Models and options that are refused on several machines, before any weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.errors import CheckpointError, ConfigError, UnsupportedTargetError
from mlx_redrafter.machines.agreement import agree_on
from mlx_redrafter.machines.frames import Do, Frame
from mlx_redrafter.machines.leading import Leader, LeadingTarget
from mlx_redrafter.machines.meeting import Machines, Rank
from mlx_redrafter.machines.splitting import check_family, split
from tests.machines.test_ends import store_tiny
from tests.models.tiny_models import build, tiny_config


class Group:
    """A group of ranks that are not there, as rank 0 sees it."""

    def __init__(self, size: int = 2):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class Line:
    """A connection to a rank that gives one answer."""

    other = "rank 1 (there)"

    def __init__(self, answer: Frame | None = None):
        self._answer = answer
        self.sent: list[Do] = []

    def send(self, data: bytes) -> None:
        self.sent.append(Do(data[0]))

    def say(self, do: Do, text: str = "") -> None:
        self.sent.append(do)

    def receive(self) -> Frame:
        assert self._answer is not None
        return self._answer


def _machines(answer: Frame | None = None) -> tuple[Machines, Line]:
    line = Line(answer)
    return Machines(Group(), [Rank.own(0)], [line]), line  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("changes", "size", "found"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}, 2, "5 n_heads"),
        ({"num_key_value_heads": 2}, 4, "2 n_kv_heads"),
        ({"intermediate_size": 63}, 2, "Cannot shard the output of size 63"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, int], size: int, found: str) -> None:
    model = build({**tiny_config("llama"), **changes})
    with pytest.raises(UnsupportedTargetError, match=found):
        split(model, Group(size))


def test_a_family_that_mlx_lm_cannot_split_is_refused() -> None:
    check_family({"model_type": "llama"})
    with pytest.raises(UnsupportedTargetError, match=r"'gemma2' cannot be split .* llama"):
        check_family({"model_type": "gemma2"})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Frame(Do.NO, (), "no such model"), r"rank 1 \(there\): no such model; copy"),
        (Frame(Do.YES, (), "0" * 64), r"rank 1 \(there\) has another config.json"),
    ],
)
def test_a_rank_without_the_model_loads_nothing(
    tmp_path: Path, answer: Frame, message: str
) -> None:
    folder, (machines, line) = store_tiny(tmp_path / "tiny"), _machines(answer)
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        agree_on(machines, str(folder), config)
    assert line.sent == [Do.CHECK]


def test_other_versions_are_named() -> None:
    own = Rank.own(0)
    assert Rank.own(1).disagreement(own) is None
    other = replace(own, rank=1, host="there", versions=("0.1", *own.versions[1:]))
    assert str(other.disagreement(own)).startswith("rank 1 (there) has mlx 0.1, rank 0 has ")


def test_options_for_one_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, _ = _machines()
    monkeypatch.setattr("mlx_redrafter.checkpoints.loading.meet", lambda group: machines)
    with pytest.raises(ConfigError, match="the bundled one is for one machine"):
        load(group=Group())
    with pytest.raises(ConfigError, match=r"adapter_path .* fuse it into the model"):
        load("org/model", adapter_path=tmp_path, group=Group())
    model = build(tiny_config("llama"))
    target = LeadingTarget(model, Leader(replace(machines, lines=[])))
    filled = target.stock_cache()
    mx.eval(model(mx.array([[1, 2]]), cache=filled))
    with pytest.raises(ConfigError, match="which the other machines lack"):
        target.new_cache(filled)

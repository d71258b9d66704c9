"""Models and options that are refused on several machines, before any weights are read."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.bench.lab.ranks import free_ports
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.cli.main import main
from mlx_redrafter.errors import CheckpointError, ConfigError, UnsupportedTargetError
from mlx_redrafter.machines import meeting
from mlx_redrafter.machines.agreement import load_together, load_when_asked
from mlx_redrafter.machines.leader import Leader
from mlx_redrafter.machines.leading import LeadingTarget
from mlx_redrafter.machines.line import Do, Frame
from mlx_redrafter.machines.meeting import Machines, Rank
from mlx_redrafter.machines.splitting import ADAPTER_FILES, check_family, digests, split
from tests.helpers.cli import python
from tests.machines.test_launch import store_tiny
from tests.models.tiny_models import build, tiny_config


class Group:
    """A group of two ranks that are not there, as rank 0 sees it."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Line:
    """A connection to a rank that gives these answers, one after the other."""

    other = "rank 1 (there)"

    def __init__(self, *answers: Frame):
        self._answers = list(answers)
        self.sent: list[Do] = []

    def say(self, do: Do, *values: object) -> None:
        self.sent.append(do)

    def receive(self) -> Frame:
        return self._answers.pop(0)


def _machines(*answers: Frame) -> tuple[Machines, Line]:
    line = Line(*answers)
    return Machines(Group(), [Rank.own(0)], [line]), line  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}, "5 n_heads"),
        ({"intermediate_size": 63}, "Cannot shard the output of size 63"),
    ],
)
def test_what_does_not_divide_is_refused(changes, found):
    model = build({**tiny_config("llama"), **changes})
    with pytest.raises(UnsupportedTargetError, match=found):
        split(model, Group())


def test_a_family_that_mlx_lm_cannot_split_is_refused():
    check_family({"model_type": "llama"})
    with pytest.raises(UnsupportedTargetError, match=r"'gemma2' cannot be split .* llama"):
        check_family({"model_type": "gemma2"})


def test_a_rank_without_the_model_loads_nothing(tmp_path):
    folder = store_tiny(tmp_path / "tiny")
    machines, line = _machines(Frame(Do.NO, ("no such model",)))
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"rank 1 \(there\): no such model; copy it"):
        load_together(machines, str(folder), config, {})
    assert line.sent == [Do.CHECK]


def test_a_rank_with_other_files_or_an_adapter_that_rank_0_lacks_says_so(tmp_path):
    folder = str(store_tiny(tmp_path / "tiny"))
    own = digests(folder)
    weights = Path(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"more")
    expected = digests(folder)
    assert expected != own
    machines, line = _machines(
        Frame(Do.CHECK, (expected | {"a file that is downloaded later": ""}, folder, None)),
        Frame(Do.CHECK, (expected | {"config.json": ""}, folder, None)),
        Frame(Do.CHECK, (expected, folder, str(tmp_path))),
        Frame(Do.CHECK, (expected, str(tmp_path / "none"), None)),
        Frame(Do.CHECK, (own, folder, None)),
        Frame(Do.END),
    )
    assert load_when_asked(machines) is None
    assert line.sent == [Do.YES, Do.NO, Do.NO, Do.NO, Do.NO]
    for name in ADAPTER_FILES:  # an adapter that rank 0 lacks
        (tmp_path / name).write_text("")
    machines, line = _machines(Frame(Do.CHECK, (expected, folder, None)), Frame(Do.END))
    assert load_when_asked(machines, own_adapter=str(tmp_path)) is None
    assert line.sent == [Do.NO]


def test_other_versions_are_named():
    own = Rank.own(0)
    assert Rank.own(1).disagreement(own) is None
    other = replace(own, rank=1, host="there", versions=("0.1", *own.versions[1:]))
    assert str(other.disagreement(own)).startswith("rank 1 (there) has mlx 0.1, rank 0 has ")


def test_machines_that_cannot_connect_are_an_error_of_one_line(monkeypatch, capfd):
    error = RuntimeError("[ring] Couldn't bind socket (error: 98)")
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(mx.distributed, "init", Mock(side_effect=error))
    assert main(["generate", "-p", "x"]) == 2
    assert capfd.readouterr().err.startswith("error: MLX cannot connect the machines: [ring] Coul")
    (port,) = free_ports(1)
    ranks = [Rank.own(0), Rank.own(1)]
    monkeypatch.setattr(meeting, "met", [])
    monkeypatch.setattr(meeting, "_introduce", lambda group: (ranks, ["127.0.0.1", port, "key"]))
    monkeypatch.setattr(Group, "rank", lambda self: 1)
    with pytest.raises(ConfigError, match=rf"cannot reach rank 0 at 127.0.0.1 port {port}"):
        meeting.meet(Group())


def test_options_for_one_machine_are_refused(monkeypatch):
    machines, _ = _machines()
    monkeypatch.setattr("mlx_redrafter.checkpoints.loading.meet", lambda group: machines)
    monkeypatch.setattr(mx.distributed, "Group", Group)
    with pytest.raises(ConfigError, match="the bundled one is for one machine"):
        load(group=Group())
    with pytest.raises(ConfigError, match="trust_remote_code is not supported"):
        load("org/model", trust_remote_code=True, group=Group())
    model = build(tiny_config("llama"))
    target = LeadingTarget(model, Leader(replace(machines, lines=[])))
    filled = target.caches.stock()
    mx.eval(model(mx.array([[1, 2]]), cache=filled))
    with pytest.raises(ConfigError, match="which the other machines lack"):
        target.caches.new(filled)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # the second has no make_cache
def test_the_loops_of_mlx_lm_make_caches_on_several_machines(model_type):
    model = build(tiny_config(model_type))
    target = LeadingTarget(model, Leader(replace(_machines()[0], lines=[])))
    made, expected = make_prompt_cache(target.stock_model), make_prompt_cache(model)
    assert list(map(type, made)) == list(map(type, expected))


def test_a_rank_that_nobody_joins_ends_with_one_line(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["there:1"], ["here:2"]]))
    waits = "import time\nfrom mlx_redrafter.cli import machines\nmachines.START_SECONDS = 0.1\n"
    waits += "with machines._limited():\n    time.sleep(60)\n"
    variables = {**os.environ, "MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}
    ended = python("-c", waits, env=variables)
    assert ended.returncode == 1
    assert ended.stderr.startswith("redrafter-mlx: rank 0 (there) did not connect within 0.1 s; ")
    assert ended.stderr.count("\n") == 1

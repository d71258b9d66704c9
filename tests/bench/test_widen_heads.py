"""Widened heads propose the same drafts."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.bench.lab.widen import widen_target
from mlx_redrafter.bench.lab.widen_heads import widen_head
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import NetworkOptions, TokenSequence, new_student
from mlx_redrafter.training.batches import HeadRows, gather, make_group
from mlx_redrafter.training.students.kv_students import KvStudent
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training_options import HEADS, Head
from tests.helpers.models import shared_model

LENGTH = 4


def _logits(student: Student, target: Target) -> np.ndarray:
    tokens = np.arange(3, 43, dtype=np.int32)
    shard = read_sequences(target, [TokenSequence(tokens, tokens > 0)], 4)
    hidden = target.layer_inputs(mx.array(tokens), student.layers or (-1,))
    group = make_group(shard, np.ones((40, LENGTH - 1), np.bool_), 40)
    batch = gather(group, np.arange(40), 40, LENGTH, HeadRows(None, target.vocab_size))
    return np.array(student.logits(student.network, batch._replace(states=hidden)))


def stir(network: nn.Module) -> None:
    """Change all weights a little: training begins with some that are zero."""
    mx.random.seed(2)
    weights = tree_flatten(network.trainable_parameters())
    noisy = [(name, value + 0.02 * mx.random.normal(value.shape)) for name, value in weights]
    network.load_weights(noisy, strict=False)


@pytest.mark.parametrize("head", [head for head in HEADS if head != "redrafter"])
def test_drafts_stay(tmp_path: Path, head: Head) -> None:
    source = shared_model("stories260k")
    target = Target(load(str(source))[0])
    student = new_student(target, NetworkOptions(head, length=LENGTH))
    student.initialise(None, 1)
    stir(student.network)
    student.save(tmp_path / "head", {})
    shape = widen_target(source, tmp_path / "wide", 16_000_000)
    kind, _ = recognise(tmp_path / "head")
    widen_head(kind.NAME, tmp_path / "head", tmp_path / "wide-head", shape.hidden_size)
    model, _, drafter = load(str(tmp_path / "wide"), drafter=str(tmp_path / "wide-head"))
    wide = Target(model)
    other = new_student(wide, NetworkOptions(head, length=LENGTH))
    other = other.holding(getattr(drafter, "network", drafter))
    if isinstance(other, KvStudent):
        other.layers = student.layers
        wide.watch(other.layers or (-1,))
    difference = np.abs(_logits(other, wide) - _logits(student, target))
    # DFlash 2 scores some of the tokens again, and this model has tokens with the same logits.
    assert np.mean(difference > 2e-4) < (1e-3 if head == "dflash2" else 1e-9)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a draft model cannot be widened"):
        widen_head("draft model", tmp_path, tmp_path / "out", 64)

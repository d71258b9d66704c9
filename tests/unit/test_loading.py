"""`load`: what it returns, and the order of its checks; importing without a back end."""

import shutil
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter import Drafter, generate, load, load_drafter, save_drafter
from mlx_redrafter.checkpoints.bundled import bundled_drafters, expand_name, find_bundled
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.errors import CheckpointError, NonFiniteError, first_line
from mlx_redrafter.proposers import redrafter
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.quantization import quantization_of
from mlx_redrafter.proposers.redrafter.precision import quantised_copy
from tests.helpers.calls import at_call
from tests.helpers.cli import python, run
from tests.helpers.models import change_tensors, random_drafter


def test_a_drafter_that_is_faster_in_8_bits_is_returned_so(stories, drafter_folder, monkeypatch):
    monkeypatch.setattr(redrafter, "tune", lambda drafter, target: quantised_copy(drafter))
    assert quantization_of(load(stories.folder, drafter=drafter_folder, tune=False)[2]) is None
    model, tokenizer, drafter = load(stories.folder, drafter=drafter_folder)
    assert isinstance(drafter, Drafter)
    assert (quantization_of(drafter) or {})["bits"] == 8
    plain = generate(model, tokenizer, "Once", drafter=None, max_tokens=40)
    assert generate(model, tokenizer, "Once", drafter=drafter, max_tokens=40) == plain


@pytest.mark.parametrize("is_precise", [False, True])
def test_what_drafts_for_a_float32_model_is_in_float32_too(tmp_path, is_precise):
    folder = tmp_path / "target"
    shutil.copytree(find_bundled("target"), folder)
    if is_precise:
        change_tensors(
            folder, lambda tensors: {k: t.astype(mx.float32) for k, t in tensors.items()}
        )
    _, _, drafter = load(folder, drafter=find_bundled("drafter"))
    assert {tensor.dtype for _, tensor in tree_flatten(drafter.parameters())} == {
        mx.float32 if is_precise else mx.float16
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [("", "ValueError"), ("a\nb", "a"), ("x:", "x:"), ("of x:\n    a = 1\nb", "of x: a = 1")],
)
def test_the_line_of_an_error_has_its_reason(text, line):
    """transformers writes it below a title."""
    assert first_line(ValueError(text)) == line


def test_options_reach_mlx_lm(stories, monkeypatch):
    seen: dict[str, Any] = {}
    at_call(monkeypatch, mlx_lm, "load", lambda path, **options: seen.update(options))
    load(stories.folder, tokenizer_config={"eos_token": "<s>"})
    assert seen["tokenizer_config"] == {"trust_remote_code": False, "eos_token": "<s>"}
    assert seen["trust_remote_code"] is False
    assert seen["adapter_path"] is None
    load_drafter(stories.folder)
    assert seen["tokenizer_config"] == {"trust_remote_code": False}, "transformers would ask"


def test_cheap_checks_come_first(stories, drafter_folder, tmp_path, monkeypatch):
    """Before the model is read, and all but the last before the drafter's weights are."""
    monkeypatch.setattr(mlx_lm, "load", None)
    folder = shutil.copytree(stories.folder, tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    sizes = {"vocab": (513, 64), "hidden": (512, 32), "infinite": (512, 64)}
    for name, values in sizes.items():
        drafter = random_drafter(*values)
        drafter.rnn_u.bias[0] = float("inf") if name == "infinite" else 0.0
        save_drafter(drafter, tmp_path / name)
    adapted = {"adapter_path": "/no/such", "drafter": drafter_folder}
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (folder, {}, "is truncated or not a safetensors file"),
        (stories.folder, {"drafter": tmp_path / "hidden"}, "hidden_size 32 does not match"),
        (stories.folder, {"drafter": tmp_path / "vocab"}, "vocab_size 513 does not match"),
        ("nobody/nothing", {}, "'nobody/nothing' is neither a local folder nor"),
        (stories.folder, adapted, "no such adapter folder: /no/such"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "fill", None)
        for model, options, message in calls:
            with pytest.raises(CheckpointError, match=message):
                load(model, **options)
    with pytest.raises(NonFiniteError):
        load(stories.folder, drafter=tmp_path / "infinite")


# Stands in for an environment with plain mlx alone on Linux.
NO_BACKEND = """
import sys

sys.modules["mlx.core"] = None
try:
    import mlx_redrafter
except ImportError as error:
    print(error)
"""


def test_no_back_end():
    (line,) = python("-c", NO_BACKEND, check=True).stdout.splitlines()
    assert "mlx[cpu]" in line
    assert "mlx[cuda13]" in line


def test_a_drafter_of_the_package_has_a_name(stories, tmp_path, capsys, monkeypatch):
    (folder,) = bundled_drafters()
    assert Pair(drafter=folder.name).drafter_name == str(folder)
    assert f"whose names --drafter takes: {folder.name}" in run(capsys, "list").err
    with pytest.raises(CheckpointError, match="does not match the target's"):
        load(stories.folder, drafter=folder.name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder.name).mkdir()
    assert expand_name(folder.name) == folder.name, "a folder here"

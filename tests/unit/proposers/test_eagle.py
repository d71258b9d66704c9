"""EAGLE heads against their published equations, whatever the steps before, and their files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mlx_redrafter.checkpoint_files import read_tensors  # noqa: E402
from mlx_redrafter.checkpoints.recognition import recognise  # noqa: E402
from mlx_redrafter.device_read import to_ints  # noqa: E402
from mlx_redrafter.draft_plan import DraftPlan  # noqa: E402
from mlx_redrafter.errors import (  # noqa: E402
    CheckpointError,
    RedrafterError,
    UnsupportedTargetError,
)
from mlx_redrafter.proposers import kv_drafting  # noqa: E402
from mlx_redrafter.proposers.checkpoint import save_drafter  # noqa: E402
from mlx_redrafter.proposers.eagle import load as load_eagle  # noqa: E402
from mlx_redrafter.proposers.eagle.published import CAPTURED  # noqa: E402
from mlx_redrafter.proposers.quantization import quantize_drafter  # noqa: E402
from mlx_redrafter.target.modules import FINAL  # noqa: E402
from mlx_redrafter.target.target import Target  # noqa: E402
from tests.helpers.flights import drafts_after_any_steps, flight_of  # noqa: E402
from tests.helpers.models import layer_inputs, tiny_llama, wrapped_tokenizer  # noqa: E402
from tests.helpers.published_eagle import (  # noqa: E402
    HIDDEN,
    LAYOUTS,
    VOCAB,
    PublishedHead,
    write_head,
)

TOLERANCE = 1e-5
MODEL = tiny_llama(seed=4, vocab_size=VOCAB)
PLANS = [DraftPlan.of(2, 5, 9), DraftPlan.of(1, 4, 4)]


def _published(name: str, tensors: Any) -> PublishedHead:
    model: Any = MODEL
    embedding, head = (
        torch.from_numpy(np.array(weight))
        for weight in (model.model.embed_tokens.weight, model["lm_head"].weight)
    )
    return PublishedHead(LAYOUTS[name], tensors, embedding, head)


def _assert_scores(
    published: PublishedHead, states: mx.array, text: Sequence[int], tree: Any
) -> None:
    """Every node's score is that of its parent and the log-probability of its token."""
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    scores = [0.0, *tree.read().scores]
    assert tokens[0] == text[-1]
    for node in range(1, len(tokens)):
        drafts, above = [], parents[node]
        while above:
            drafts.insert(0, tokens[above])
            above = parents[above]
        log_probs = published.log_probs(torch.from_numpy(np.array(states)), text[1:], drafts)[-1]
        ids = published.to_ids(torch.arange(len(log_probs)))
        (row,) = (ids == tokens[node]).nonzero()[0].tolist()
        found = scores[node] - scores[parents[node]]
        assert found == pytest.approx(log_probs[row].item(), abs=TOLERANCE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_levels_are_those_of_the_equations_whatever_the_steps_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_drafting, "READ_STEP_SIZE", 3)  # skipped passes are read in pieces
    tensors = write_head(tmp_path, LAYOUTS[name])
    published = _published(name, tensors)
    eagle = load_eagle(tmp_path)
    width, rng = eagle.config.num_captured * HIDDEN, random.Random(name)
    for text, states, tree in drafts_after_any_steps(eagle, Target(MODEL), width, PLANS, rng):
        _assert_scores(published, states, text, tree)


def test_a_shared_cache_holds_the_pairs_of_the_text_in_the_end(tmp_path: Path) -> None:
    write_head(tmp_path, LAYOUTS["speculators"])
    eagle = load_eagle(tmp_path)
    target = Target(MODEL)
    text = [5, 17, 3, 60, 9, 30, 31, 32, 33]
    states = mx.random.normal((len(text) - 1, 3 * HIDDEN), key=mx.random.key(5))
    cached = eagle.make_cache()
    drafting: Any = eagle.open(target, text[:4], True, cached)
    drafting.reader.read(states[:3])
    drafting.propose(flight_of([60], 0, 9, 3, states[3:4]), PLANS[0], None)
    drafting.propose(flight_of([9, 30, 31], 2, 32, 4, states[4:7]), PLANS[0], None)
    drafting.skip(flight_of([32], 0, 33, 7, states[7:8]))
    expected = eagle.make_cache()
    eagle(eagle.fuse(states), target.modules.embed(mx.array(text[1:])), expected)
    for length in (8, 7, 5):
        drafting.trim_to(length)
        for layer, reference in zip(cached, expected, strict=True):
            assert layer.offset == length - 1
            for rows, truth in zip(layer.state[:2], reference.state[:2], strict=True):
                found, wanted = rows[..., : length - 1, :], truth[..., : length - 1, :]
                assert mx.allclose(found, wanted, atol=TOLERANCE).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_heads_are_recognised_and_written_in_one_layout(
    name: str, tmp_path: Path
) -> None:
    write_head(tmp_path / "published", LAYOUTS[name])
    assert recognise(tmp_path / "published")[0].NAME == "EAGLE head"
    eagle = load_eagle(tmp_path / "published")
    quantize_drafter(eagle, 8, 32)
    save_drafter(eagle, tmp_path / "own")
    assert recognise(tmp_path / "own")[0].NAME == "EAGLE head"
    again = load_eagle(tmp_path / "own")
    assert again.config == eagle.config
    rows = mx.random.normal((3, eagle.config.num_captured * HIDDEN), key=mx.random.key(1))
    tokens = mx.random.normal((3, HIDDEN), key=mx.random.key(2))
    one, other = (net(net.fuse(rows), tokens, net.make_cache()) for net in (eagle, again))
    assert mx.array_equal(one, other).item()


def test_layer_ids_mean_outputs_where_specforge_writes_them(tmp_path: Path) -> None:
    for values, layers in (
        ({"eagle_config": {CAPTURED: [1, 3, 4]}}, (2, 4, 5)),  # outputs by SpecForge
        ({"eagle_config": {CAPTURED: [2, 4, 5]}}, (2, 4, 5)),  # inputs by NVIDIA
        ({CAPTURED: [1, 3, 4]}, (1, 3, 4)),  # inputs by speculators
    ):
        write_head(tmp_path, LAYOUTS["EAGLE-3"])
        _change(tmp_path, **values)
        assert load_eagle(tmp_path).config.captured_layers == layers
    # A file that names none means some of the target's.
    write_head(tmp_path, LAYOUTS["speculators"])
    eagle = load_eagle(tmp_path)
    assert eagle.captured_layers(Target(tiny_llama(layers=8))) == (2, 4, 5)


def test_the_state_after_the_last_layer_is_its_output_before_the_norm() -> None:
    model: Any = tiny_llama(seed=4, vocab_size=VOCAB)
    target = Target(model)
    num_layers = len(target.modules.layers)
    target.modules.watch([num_layers - 1, num_layers])
    text = mx.array([5, 17, 3])
    states = layer_inputs(target, text, [num_layers - 1, num_layers, FINAL])
    before, last, normed = mx.split(states, 3, axis=-1)
    assert mx.allclose(model.layers[-1](before[None], "causal")[0], last, atol=TOLERANCE).item()
    assert mx.array_equal(model.model.norm(last), normed).item()


def _change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 64}, r"fc.weight' has shape \[32, 96\], expected \[64, 192\]"),
        ({"num_hidden_layers": 2}, "layers.1.self_attn.q_proj.weight is missing"),
        ({"norm_before_fc": True}, "input_norm.weight is missing"),
        ({"intermediate_size": 40}, r"midlayer.mlp.up_proj.weight' has shape \[48, 32\], expected"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"intermediate_size": "48"}, "intermediate_size must be an integer"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling factor must be a number"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window must be an integer from 1"),
        ({"layer_types": ["sliding_attention", 1]}, "layer_types must be one of"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "but the tensor fc.weight"),
        ({"speculators_model_type": "peagle"}, "expected mask_token_id in the config.json"),
    ],
    ids=str,
)
def test_contradicting_configs_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_head(tmp_path, LAYOUTS["EAGLE-3"])
    _change(tmp_path, **values)
    with pytest.raises(CheckpointError, match=message):
        load_eagle(tmp_path)


def test_heads_for_other_models_are_refused(tmp_path: Path) -> None:
    tokenizer = wrapped_tokenizer(VOCAB)
    write_head(tmp_path, LAYOUTS["speculators 3.1"])
    proposer = load_eagle(tmp_path)
    proposer.check_fit(Target(MODEL), tokenizer)
    with pytest.raises(UnsupportedTargetError, match=r"layers 0 to 0 .* found 2"):
        proposer.check_fit(Target(tiny_llama(layers=1)), tokenizer)
    with pytest.raises(CheckpointError, match="vocab_size 64 does not match the target's 80"):
        proposer.check_fit(Target(tiny_llama(vocab_size=80)), wrapped_tokenizer(80))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "is a MLP speculator"),
        ({"speculators_model_type": "xpress"}, "is a drafter of speculators_model_type 'xpress'"),
        ({"model_type": "deepseek_v4_mtp"}, "is a module with multi-token prediction alone"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        recognise(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "add", "message"),
    [
        (
            "fc.weight",
            "",
            0,
            "head has use_aux_hidden_state True, but no tensor fc.weight",
        ),
        ("mlp.up_proj.weight", "mlp.gate.weight", 0, "this EAGLE head has a mixture of experts"),
        ("q_proj.weight", "kv_a_proj_with_mqa.weight", 0, "head has layers with latent attention"),
        ("d2t", "d2t", mx.arange(3, 43), "token_ids in .* ids from 0 to 63"),
        ("norm.weight", "norm.weight", mx.nan, r"NaN or infinite weights in .*norm\.weight"),
    ],
)
def test_tensors_of_other_forms_are_named(
    old: str, new: str, add: Any, message: str, tmp_path: Path
) -> None:
    write_head(tmp_path, LAYOUTS["EAGLE-3"])
    changed = {
        name.replace(old, new): tensor + add if name == old else tensor
        for name, tensor in read_tensors(tmp_path).items()
        if new or name != old
    }
    mx.eval(changed)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), changed)
    assert recognise(tmp_path)[0].NAME == "EAGLE head"
    with pytest.raises(RedrafterError, match=message):
        load_eagle(tmp_path)

"""EAGLE heads and SpecFormer against their published equations in torch, and their files."""

import json
import random
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import trim_prompt_cache

from mlx_redrafter import generate
from mlx_redrafter.checkpoint_files import named_parameters, read_tensors
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import (
    CheckpointError,
    ConfigError,
    RedrafterError,
    UnsupportedTargetError,
)
from mlx_redrafter.proposers import kv_drafting
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle import load as load_eagle
from mlx_redrafter.proposers.eagle.published import CAPTURED
from mlx_redrafter.proposers.specformer import SpecFormer, SpecFormerConfig
from mlx_redrafter.proposers.specformer import load as load_specformer
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target
from tests.helpers.flights import drafts_after_any_steps, flight_of
from tests.helpers.models import (
    change_config,
    draw_weights,
    layer_inputs,
    tiny_llama,
    wrapped_tokenizer,
)
from tests.helpers.oracles import node_paths
from tests.models.tiny_models import build, tiny_config
from tests.unit.target.test_tree_cache import assert_same_rows

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.helpers import torch_heads  # noqa: E402
from tests.helpers.published_eagle import LAYOUTS, published_head, write_head  # noqa: E402
from tests.helpers.published_heads import HIDDEN, VOCAB  # noqa: E402

TOLERANCE = 5e-5  # of sums over a path, in float32, by two libraries
MODEL = tiny_llama(seed=4, vocab_size=VOCAB)
PLANS = [DraftPlan.of(2, 5, 9), DraftPlan.of(1, 4, 4)]


def _torch(*names: str) -> Iterator[torch.Tensor]:
    for name, weight in named_parameters(MODEL).items():
        if name.removeprefix("model.").removesuffix(".weight") in names:
            yield torch.from_numpy(np.array(weight))


def _assert_scores(
    head: torch_heads.Head, to_ids: Any, states: mx.array, text: Sequence[int], tree: Any
) -> None:
    """Every node's score is that of its parent and the log-probability of its token.

    The most probable token after the root is drafted.
    """
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    scores = [0.0, *tree.read().scores]
    assert tokens[0] == text[-1]
    for path in (path for path in node_paths(parents) if path[-1] not in parents):
        drafts = [tokens[above] for above in path[1:-1]]
        levels = head(torch.from_numpy(np.array(states)), text[1:], drafts)
        ids = (torch.arange(len(levels[0])) + to_ids).tolist()
        for node, logits in zip(path[1:], levels, strict=True):
            expected = logits.log_softmax(-1)[ids.index(tokens[node])].item()
            assert scores[node] - scores[parents[node]] == pytest.approx(expected, abs=TOLERANCE)
    assert ids[levels[0].argmax()] in tokens[1:]


@pytest.mark.parametrize("name", LAYOUTS)
def test_levels_are_those_of_the_equations_whatever_the_steps_before(name, tmp_path, monkeypatch):
    """Of published heads, written in one layout and read again."""
    monkeypatch.setattr(kv_drafting, "READ_STEP_SIZE", 3)  # skipped passes are read in pieces
    tensors = write_head(tmp_path / "published", LAYOUTS[name])
    head = published_head(LAYOUTS[name], tensors, *_torch("embed_tokens", "lm_head"))
    published = load_eagle(tmp_path / "published")
    save_drafter(published, tmp_path / "own")
    assert {recognise(path)[0].NAME for path in tmp_path.iterdir()} == {"EAGLE head"}
    eagle = load_eagle(tmp_path / "own")
    assert eagle.config == published.config
    width, rng = eagle.config.num_captured * HIDDEN, random.Random(name)
    for text, states, tree in drafts_after_any_steps(eagle, Target(MODEL), width, PLANS, rng):
        _assert_scores(head, tensors.get("d2t", 0), states, text, tree)


def test_a_shared_cache_holds_the_pairs_of_the_text_in_the_end(tmp_path):
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
        trim_prompt_cache(expected, expected[0].offset - (length - 1))
        assert_same_rows(cached, expected)


def test_layer_ids_mean_outputs_where_specforge_writes_them(tmp_path):
    for values, layers in (
        ({"eagle_config": {CAPTURED: [1, 3, 4]}}, (2, 4, 5)),  # outputs by SpecForge
        ({"eagle_config": {CAPTURED: [2, 4, 5]}}, (2, 4, 5)),  # inputs by NVIDIA
        ({CAPTURED: [1, 3, 4]}, (1, 3, 4)),  # inputs by speculators
    ):
        write_head(tmp_path, LAYOUTS["EAGLE-3"])
        change_config(tmp_path, **values)
        assert load_eagle(tmp_path).config.captured_layers == layers
    # A file that names none means some of the target's.
    write_head(tmp_path, LAYOUTS["speculators"])
    eagle = load_eagle(tmp_path)
    assert eagle.captured_layers(Target(tiny_llama(layers=8))) == (2, 4, 5)


def test_the_state_after_the_last_layer_is_its_output_before_the_norm():
    model: Any = tiny_llama(seed=4, vocab_size=VOCAB)
    target = Target(model)
    num_layers = len(target.modules.layers)
    target.modules.watch([num_layers - 1, num_layers])
    text = mx.array([5, 17, 3])
    states = layer_inputs(target, text, [num_layers - 1, num_layers, FINAL])
    before, last, normed = mx.split(states, 3, axis=-1)
    assert mx.allclose(model.layers[-1](before[None], "causal")[0], last, atol=TOLERANCE).item()
    assert mx.array_equal(model.model.norm(last), normed).item()


def test_contradicting_configs_are_refused(tmp_path):
    for values, message in (
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
    ):
        write_head(tmp_path, LAYOUTS["EAGLE-3"])
        change_config(tmp_path, **values)
        with pytest.raises(CheckpointError, match=message):
            load_eagle(tmp_path)
    for config, message in (
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "is a MLP speculator"),
        ({"speculators_model_type": "xpress"}, "is a drafter of speculators_model_type 'xpress'"),
        ({"model_type": "deepseek_v4_mtp"}, "is a module with multi-token prediction alone"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            recognise(tmp_path)


def test_heads_for_other_models_are_refused(tmp_path):
    tokenizer = wrapped_tokenizer(VOCAB)
    write_head(tmp_path, LAYOUTS["speculators 3.1"])
    proposer = load_eagle(tmp_path)
    proposer.check_fit(Target(MODEL), tokenizer)
    with pytest.raises(UnsupportedTargetError, match=r"layers 0 to 0 .* found 2"):
        proposer.check_fit(Target(tiny_llama(layers=1)), tokenizer)


def test_tensors_of_other_forms_are_named(tmp_path):
    changes: list[tuple[str, str, Any, str]] = [
        ("fc.weight", "", 0, "head has use_aux_hidden_state True, but no tensor fc.weight"),
        ("mlp.up_proj.weight", "mlp.gate.weight", 0, "this EAGLE head has a mixture of experts"),
        ("q_proj.weight", "kv_a_proj_with_mqa.weight", 0, "head has layers with latent attention"),
        ("d2t", "d2t", mx.arange(3, 43), "token_ids in .* ids from 0 to 63"),
        ("norm.weight", "norm.weight", mx.nan, r"NaN or infinite weights in .*norm\.weight"),
    ]
    for old, new, add, message in changes:
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


WIDTH, SLOTS, HEADS, EPS = 48, 4, 4, 1e-6
LAYERS = (0, 1, 1, -1)
SHORT_PLANS = [DraftPlan.of(2, 5, 9), DraftPlan.of(1, 4, 4), DraftPlan.of(3, 2, 4)]


def new_network() -> SpecFormer:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    config = SpecFormerConfig(**sizes, **heads, captured_layers=LAYERS, num_slots=SLOTS)
    return draw_weights(SpecFormer(config))


def specformer_head(network: SpecFormer) -> torch_heads.Head:
    """The published equations on the same tensors."""
    own = named_parameters(network)
    weights = {name: torch.from_numpy(np.array(tensor)) for name, tensor in own.items()}
    norm, head = _torch("norm", "lm_head")
    frozen = torch_heads.Frozen(head, head, norm, 1e-5, EPS)
    layer = torch_heads.Layer(HEADS, 2, 10000.0)
    return torch_heads.specformer(weights, frozen, layer, len(LAYERS))


def test_slots_are_those_of_the_equations_whatever_the_steps_before():
    network = new_network()
    published, width, rng = specformer_head(network), len(LAYERS) * HIDDEN, random.Random(1)
    steps = drafts_after_any_steps(network, Target(MODEL), width, SHORT_PLANS, rng)
    for text, states, tree in steps:
        _assert_scores(published, 0, states, text, tree)


def test_files_that_do_not_fit_are_refused(tmp_path):
    save_drafter(new_network(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"num_slots": 0}, "num_slots must be"),
        ({"captured_layers": []}, "captured_layers must be a list of 1 to 64 layers"),
        ({"captured_layers": 3}, "captured_layers must be a list"),
        ({"captured_layers": [-2, 0]}, "each of captured_layers must be"),
        ({"hidden_size": 33}, "hidden_size must be a multiple"),
        ({"captured_layers": [0, 1]}, "down_samp.weight' has shape"),
        ({"rope_scaling": {"type": "nonsense"}}, "check rope_scaling"),
        ({"model_type": "redrafter_medusa"}, "expected a drafter with model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            load_specformer(tmp_path)


def test_other_targets_are_refused():
    tokenizer = wrapped_tokenizer(VOCAB, set())
    options = {"drafter": new_network(), "beam_width": 1, "beam_length": 6}
    with pytest.raises(ConfigError, match="beam_length must be an integer from 2 to 5"):
        generate(MODEL, tokenizer, [1, 2], **options)
    without = Target(build(tiny_config("nanochat")))  # its last norm has no weight
    with pytest.raises(UnsupportedTargetError, match="LM head gets the output of a norm"):
        without.modules.normalise(mx.zeros((1, without.hidden_size)))


NORMS = {
    "gemma2": "model.norm", "gpt2": "model.ln_f", "lfm2": "model.embedding_norm",
    "mamba2": "backbone.norm_f", "phixtral": "lm_head.ln", "stablelm": "model.norm",
}  # fmt: skip


@pytest.mark.parametrize(("name", "path"), NORMS.items())
def test_the_norm_before_the_head_is_found(name, path):
    model = build(tiny_config(name))
    target = Target(model)
    states = mx.random.normal((3, target.hidden_size), key=mx.random.key(0))
    norm = reduce(getattr, path.split("."), model)
    assert mx.array_equal(target.modules.normalise(states), norm(states)).item()

"""MTP modules: their levels against torch, and their files."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_redrafter import generate, load
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.families import QWEN
from mlx_redrafter.target.target import Target
from tests.conftest import Trained
from tests.helpers import mtp
from tests.helpers.flights import drafts_after_any_steps
from tests.helpers.models import quantize_wide
from tests.helpers.mtp import MIMO, family_config, module_tensors, tiny_mimo, write
from tests.models.tiny_models import build


@pytest.mark.torch
@pytest.mark.parametrize("name", ["tied mimo", *mtp.TORCH_NAMES])
def test_every_level_is_torchs_after_accepted_rejected_and_skipped_drafts(name, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    is_tied = name == "tied mimo"
    config = {**MIMO, "tie_word_embeddings": True} if is_tied else family_config(name)
    model = tiny_mimo(config) if name.endswith("mimo") else build(config)
    tensors, target = module_tensors(config), Target(model)
    module: Any = load_mtp(write(tmp_path, tensors, config))
    published = mtp.TorchModule(torch, config, tensors)
    embed = lambda tokens: np.array(target.modules.embed(mx.array(tokens)))  # noqa: E731
    steps = module, target, target.hidden_size, [DraftPlan.of(1, 4, 4)], random.Random(name)
    for text, states, tree in drafts_after_any_steps(*steps):
        scores = np.diff([0.0, *tree.read().scores])
        # A pair for every token but the first: the state before it, and its embedding.
        pairs = np.concatenate([np.array(states), embed(text[1:])], axis=1)
        for token, score in zip(to_ints(tree.tokens)[1:], scores, strict=True):
            normed, fed = (rows[-1:].numpy() for rows in published(pairs))
            logits = target.modules.logits(mx.array(normed))[0]
            log_probs = np.array(logits - mx.logsumexp(logits))
            assert score == pytest.approx(float(log_probs[token]), abs=1e-5)
            pairs = np.concatenate([pairs, np.concatenate([fed, embed([token])], axis=1)])


def own_folder(stories: Trained, folder: Path, tensors: Mapping[str, mx.array]) -> Path:
    """A published MiMo: the model, its MTP module and a tokenizer."""
    config = {**MIMO, "vocab_size": 512, "eos_token_id": 2}
    model = named_parameters(tiny_mimo(config=config))
    write(folder, {**model, **tensors}, config)
    for path in stories.folder.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def test_a_models_own_module_and_one_beside_it(stories, tmp_path):
    folder = own_folder(stories, tmp_path / "mimo", module_tensors())
    sidecar = write(tmp_path / "mtp", module_tensors(), {**MIMO, "vocab_size": 512})
    assert recognise(sidecar)[0].NAME == "MTP module"
    assert "an MTP module of a model of type" in inspect_checkpoint(sidecar).kind
    for drafter in ("mtp", sidecar):
        model, tokenizer, module = load(folder, drafter=drafter)
        options: dict[str, Any] = {"max_tokens": 20, "beam_width": 2}
        plain, drafted = (
            generate(model, tokenizer, "Lily", drafter=one, **options) for one in (None, module)
        )
        assert drafted == plain


def test_norms_and_experts_of_mlx_files_stay_as_they_are(tmp_path):
    config = family_config("qwen3_next")
    published = load_mtp(write(tmp_path / "published", module_tensors(config), config))
    own = {f"mtp.layers.0.{n}": t for n, t in named_parameters(published.block).items()}
    names = {"join": "fc", "norm": "norm"}
    names |= {f"{part}_norm": f"pre_fc_norm_{part}" for part in ("embedding", "hidden")}
    own |= {f"mtp.{name}.weight": published[part].weight for part, name in names.items()}
    bare = {name.removeprefix("mtp."): tensor for name, tensor in own.items()}
    sidecar = {"model_type": "qwen3_5_mtp", "text_config": {**config, "model_type": "qwen3_5"}}
    read = load_mtp(write(tmp_path / "sidecar", bare, sidecar))
    mx.save_safetensors(str(tmp_path / "published/model.safetensors"), own, {"format": "mlx"})
    for other in (read, load_mtp(tmp_path / "published")):
        for name, tensor in named_parameters(published).items():
            assert mx.array_equal(named_parameters(other)[name], tensor), name
    assert recognise(tmp_path / "sidecar")[0].NAME == "MTP module"
    nn.quantize(published, group_size=32, bits=4)
    back = {own: name for name, own in QWEN.names.items()}
    quantised = {
        next(back[old] + name.removeprefix(old) for old in back if name.startswith(old)): tensor
        for name, tensor in named_parameters(published).items()
    }
    options = {"quantization": {"group_size": 32, "bits": 4}}
    read = load_mtp(write(tmp_path / "sidecar", quantised, {**sidecar, **options}))
    assert read.block.mlp.switch_mlp.up_proj.bits == 4


# Names of mlx-vlm's splitter for GLM-4.7-Flash (``glm4_moe_lite_mtp/split.py``), by those of `Mtp`.
GLM_SIDECAR = {
    "block.": "model.mtp_block.",
    "embedding_norm.": "model.enorm.",
    "hidden_norm.": "model.hnorm.",
    "join.": "model.eh_proj.",
    "norm.": "model.shared_head_norm.",
}


@pytest.mark.parametrize("quantisation", [None, (64, 4, "affine"), (32, 8, "mxfp8")], ids=str)
def test_a_folder_of_glm_has_names_of_its_own(quantisation, tmp_path):
    config = family_config("glm4_moe_lite")
    published = load_mtp(write(tmp_path / "published", module_tensors(config), config))
    values: dict[str, Any] = {"model_type": "glm4_moe_lite_mtp", "text_config": config}
    if quantisation is not None:
        size, bits, mode = quantisation
        values["quantization"] = {"group_size": size, "bits": bits, "mode": mode}
        quantize_wide(published, size, bits, mode)
    tensors = {"lm_head.weight": mx.zeros((64, 8)), "model.embed_tokens.weight": mx.zeros((64, 8))}
    for own, tensor in named_parameters(published).items():
        old = next(filter(own.startswith, GLM_SIDECAR))
        tensors[GLM_SIDECAR[old] + own.removeprefix(old)] = tensor
    sidecar = write(tmp_path / "sidecar", tensors, values)
    assert recognise(sidecar)[0].NAME == "MTP module"
    read = named_parameters(load_mtp(sidecar))
    for own, tensor in named_parameters(published).items():
        assert mx.array_equal(read[own], tensor), own


def test_fp8_weights_of_deepseek_are_unpacked_and_others_refused(tmp_path):
    for model_type in ("deepseek_v3", "qwen3_next"):
        config = family_config(model_type)
        tensors = module_tensors(config)
        name = next(name for name in tensors if name.endswith("o_proj.weight"))
        weight = tensors[name]
        tensors |= {name: mx.to_fp8(weight), f"{name}_scale_inv": mx.full((1, 1), 2.0)}
        folder = write(tmp_path, tensors, config)
        if model_type == "deepseek_v3":
            read = load_mtp(folder).block.self_attn.o_proj.weight
            assert mx.allclose(read.astype(mx.float32), 2 * weight, rtol=0.07, atol=0.01)
        else:
            with pytest.raises(CheckpointError, match=r"weight_scale_inv. of shape .* is"):
                load_mtp(folder)


def changed(name: str, tensor: mx.array | None) -> dict[str, mx.array]:
    tensors = {**module_tensors(), mtp.MIMO_PREFIX + name: tensor}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


# Tensors that are refused wherever they are read.
BAD_TENSORS: list[tuple[Mapping[str, mx.array], str]] = [
    ({"model.embed_tokens.weight": mx.ones((64, 32))}, r"no tensors model\.mtp_layers\.0\.\*"),
    (changed("self_attn.k_proj.bias", None), r"layers\.0\.self_attn\.k_proj\.bias is missing"),
    (changed("input_proj.weight", mx.ones((32, 32))), r"\[32, 32\], expected \[32, 64\]"),
    (changed("x.weight", mx.ones(2)), r"x\.weight. of shape"),
]


def test_bad_files_are_refused(tmp_path):
    nemotron = family_config("nemotron_h")
    odd = {**nemotron, "mtp_hybrid_override_pattern": "*M"}
    mode = {"group_size": 32, "bits": 8, "mode": "mxfp4"}
    bad: list[tuple[Mapping[str, mx.array], dict[str, Any], str]] = [
        *((tensors, {}, message) for tensors, message in BAD_TENSORS),
        (changed("final_layernorm.weight", mx.full((32,), mx.nan)), {}, "NaN .*final_layernorm"),
        (module_tensors(), {"model_type": "llama"}, "module, of type deepseek_v3, .* 'llama'"),
        (module_tensors(), {"vocab_size": 0}, "vocab_size 0"),
        (module_tensors(), {"quantization": mode}, r"mxfp4 needs .* \(32, 4\), got \(32, 8\)"),
        (module_tensors(nemotron), odd, r"mtp_hybrid_override_pattern of att.* found '\*M'"),
        (module_tensors(), dict.fromkeys(MIMO) | {"model_type": "mimo"}, "does not describe"),
    ]
    for tensors, changes, message in bad:
        with pytest.raises(RedrafterError, match=message):
            load_mtp(write(tmp_path, tensors, {**MIMO, **changes}))

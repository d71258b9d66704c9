"""Published heads against what the packages that publish them compute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.proposers.assistant import load as load_assistant
from mlx_redrafter.proposers.autoregressive import _Levels
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle import load as load_eagle
from mlx_redrafter.proposers.eagle.network import ParallelDrafting
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.quantization import FLOAT_MODES, quantization_of
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from tests.golden.record_heads import FILE, LONG, SHORT
from tests.helpers.flights import flight_of
from tests.helpers.mtp import family_config, module_tensors
from tests.helpers.published_heads import (
    ASSISTANTS,
    NUM_DRAFTS,
    SIDECARS,
    SPECULATORS,
    assistant_inputs,
    assistant_tensors,
    pairs,
    speculators_head,
    text_and_states,
    write,
)

TOLERANCE = 1e-4
RECORDED = mx.load(str(FILE))


def log_softmax(logits: Any) -> np.ndarray:
    rows = mx.array(logits)
    return np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))


@pytest.mark.parametrize("name", SPECULATORS)
def test_heads_of_speculators_have_its_logits(name: str, tmp_path: Path) -> None:
    """After texts within and beyond the window, and after one to three drafts."""
    tensors = speculators_head(name)
    write(tmp_path, SPECULATORS[name], tensors)
    assert recognise(tmp_path)[0].NAME == "EAGLE head"
    head = load_eagle(tmp_path)
    table = mx.array(tensors["embed_tokens.weight"])
    modules = SimpleNamespace(embed=lambda tokens: table[tokens])
    target: Any = SimpleNamespace(modules=modules)
    text, states = text_and_states()
    expected = log_softmax(RECORDED[name])
    for end in (2, 4, 7, len(states) - NUM_DRAFTS):
        drafting: Any = head.open(target, text[:end], True, [])
        drafting.reader.read(mx.array(states[: end - 1]))
        flight = flight_of(
            text[end - 1 : end], 0, text[end], end - 1, mx.array(states[end - 1 : end])
        )
        if isinstance(drafting, ParallelDrafting):
            found = drafting.scores(flight, 1 + NUM_DRAFTS)
        else:
            levels = _Levels([drafting], [flight])
            rows = [levels.first()]
            for depth in range(1, 1 + NUM_DRAFTS):
                draft = mx.array(text[end + depth : end + depth + 1])
                rows.append(levels.following(None, draft, depth))
            found = mx.concatenate(rows)
        assert np.allclose(np.array(found), expected[:, end - 1], atol=TOLERANCE), end


@pytest.mark.parametrize("name", SIDECARS)
def test_modules_that_mlx_vlm_splits_off_have_its_outputs(name: str, tmp_path: Path) -> None:
    """From codes as well, which MLX computes alike in the splitter and here."""
    model_type, mode = SIDECARS[name]
    config = family_config(model_type)
    weights = {name: np.array(weight) for name, weight in module_tensors(config).items()}
    module = load_mtp(write(tmp_path / "published", config, weights))
    if mode is not None:
        size, bits = FLOAT_MODES[mode]

        def is_coded(name: str, layer: Any) -> bool:
            """Whether mlx-vlm's splitters quantise a layer: matrices except those of routers."""
            is_matrix = hasattr(layer, "to_quantized") and layer.weight.shape[-1] % size == 0
            return is_matrix and not name.endswith("mlp.gate")

        nn.quantize(module, size, bits, mode=mode, class_predicate=is_coded)
    save_drafter(module, tmp_path / "sidecar")
    assert recognise(tmp_path / "sidecar")[0].NAME == "MTP module"
    module = load_mtp(tmp_path / "sidecar")
    assert quantization_of(module) == (
        mode and {"group_size": FLOAT_MODES[mode][0], "bits": FLOAT_MODES[mode][1], "mode": mode}
    )
    hidden, embeddings = (mx.array(rows) for rows in pairs(config["hidden_size"]))
    outputs = module.norm(module(hidden, embeddings, module.make_cache()))
    assert np.allclose(np.array(outputs), np.array(RECORDED[name]), atol=TOLERANCE)


@pytest.mark.parametrize("reference", ["mlx-vlm", "transformers"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_assistants_have_the_logits_of_mlx_vlm_and_transformers(
    name: str, reference: str, tmp_path: Path
) -> None:
    """Within the window, and in mlx-vlm beyond it; transformers' window is two tokens wider."""
    write(tmp_path, ASSISTANTS[name], assistant_tensors(name))
    assert recognise(tmp_path)[0].NAME == "Gemma 4 assistant"
    assistant = load_assistant(tmp_path)
    assistant.hook()
    length = LONG if reference == "mlx-vlm" else SHORT
    expected = np.array(RECORDED[name if length == LONG else f"{name}, transformers"])
    entries, inputs = assistant_inputs(length)
    rows = mx.arange(length)
    contexts = [
        (*(mx.array(entries[f"{kind}_attention {part}"]) for part in ("keys", "values")), seen)
        for kind, seen in (("full", rows >= 0), ("sliding", rows > length - 8))
    ]
    state = mx.array(inputs[:1, 64:])
    for row, wanted in zip(inputs, expected, strict=True):
        embedding = mx.array(row[None, :64])
        with tree_positions(TreePositions(mx.array([[length]]), [range(length, length + 1)])):
            outputs = assistant(state, embedding, contexts)
        logits = np.array(assistant.logits(outputs, None)[0])
        scored = np.isfinite(logits)
        assert np.allclose(logits[scored], wanted[scored], atol=TOLERANCE)
        # The references give tokens of other clusters one less than the least score.
        assert np.allclose(wanted[~scored], wanted[scored].min() - 1, atol=TOLERANCE)
        state = assistant.post_projection(outputs)

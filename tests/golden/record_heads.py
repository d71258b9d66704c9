"""Recorder of outputs of heads in the packages that publish them; see `published_heads`.

`python -m tests.golden.record_heads` writes the file. It needs torch, transformers, mlx-vlm and
speculators. Recorded on 2026-11-26, MTP modules on 2026-11-30, with torch 2.13.0, transformers
5.24.0, mlx-vlm 0.7.10 and speculators 0.9.0.
"""

import copy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.helpers import published_heads
from tests.helpers.mtp import family_config, module_tensors, write
from tests.helpers.published_heads import ASSISTANTS, SPECULATORS

# Numbers of entries of a target, within and beyond the window of 8 tokens.
SHORT, LONG = 6, 13
FILE = Path(__file__).with_name("heads.safetensors")


def record_speculators(name: str) -> np.ndarray:
    """Logits after each token of the text and after true drafts, shape (1 + drafts, n - 1, V)."""
    import torch

    # Only reading of training data uses it.
    sys.modules.setdefault("hs_connectors", _transfers())
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle import core as peagle
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from transformers import AutoConfig

    values = {k: v for k, v in SPECULATORS[name].items() if k != "speculators_config"}
    layer = values.pop("transformer_layer_config")
    layer_config = AutoConfig.for_model(**layer)
    layer_config._attn_implementation = "eager"
    is_parallel = values["speculators_model_type"] == "peagle"
    config_type = PEagleSpeculatorConfig if is_parallel else Eagle3SpeculatorConfig
    model: Any = (peagle.PEagleDraftModel if is_parallel else Eagle3DraftModel)(
        config_type(transformer_layer_config=layer_config, **values)
    )
    state = {
        k: torch.from_numpy(np.array(v)) for k, v in published_heads.speculators_head(name).items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("verifier" in one for one in missing)
    model.eval()
    logits: list[Any] = []
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].detach()))
    text, states = published_heads.text_and_states()
    count, depths = len(states), 1 + published_heads.NUM_DRAFTS
    inputs: dict[str, Any] = {
        "hidden_states": torch.from_numpy(states)[None],
        "input_ids": torch.tensor(text[1:])[None],
        "document_ids": torch.zeros(1, count, dtype=torch.long),
    }
    with torch.no_grad():
        if not is_parallel:
            model(**inputs, ttt_steps=depths)
            return torch.stack(logits).numpy()
        anchors, depth = (
            torch.arange(count).repeat(depths),
            torch.arange(depths).repeat_interleave(count),
        )
        kept = anchors + depth < count
        peagle.generate_cod_sample_indices = lambda **_: (anchors[kept], depth[kept])
        peagle.compute_metrics = lambda **_: (None, None)
        model(**inputs, verifier_last_hidden_states=torch.zeros(1, count, 32))
    found = torch.zeros(depths, count, published_heads.DRAFT_VOCAB)
    found[depth[kept], anchors[kept]] = logits[0]
    return found.numpy()


def record_sidecar(name: str) -> np.ndarray:
    """Normalised outputs of an MTP module that mlx-vlm has split from a model, shape (n, H)."""
    import mlx.core as mx
    from mlx_vlm.speculative.drafters import load_drafter
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    model_type, mode = published_heads.SIDECARS[name]
    config = family_config(model_type)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "model"), Path(folder, "mtp")
        write(source, module_tensors(config), config)
        splitter = get_mtp_splitter(model_type)
        assert splitter is not None
        splitter.split(str(source), str(out), q_mode=mode)
        drafter: Any = load_drafter(str(out), kind="mtp")[0]
    hidden, embeddings = (
        mx.array(rows)[None] for rows in published_heads.pairs(config["hidden_size"])
    )
    tokens = mx.zeros(hidden.shape[:2], dtype=mx.int32)
    caches = drafter.make_cache()
    if model_type == "nemotron_h":
        outputs, _ = drafter._forward_hidden(embeddings, hidden, tokens, caches)
    else:
        positions = mx.arange(hidden.shape[1])[None]
        outputs = drafter._forward_hidden(embeddings, hidden, caches, positions)
    return np.array(outputs[0].astype(mx.float32))


def record_assistant(name: str, length: int, is_torch: bool) -> np.ndarray:
    """Logits of one draft after another by mlx-vlm or transformers, shape (drafts, V)."""
    entries, inputs = published_heads.assistant_inputs(length)
    step = (_torch_assistant if is_torch else _mlx_assistant)(name, entries, length)
    logits, state = [], inputs[0, 64:]
    for row in inputs:
        state, scores = step(np.concatenate([row[:64], state]))
        logits.append(scores)
    return np.stack(logits)


def _mlx_assistant(name: str, entries: dict[str, np.ndarray], length: int) -> Any:
    import mlx.core as mx
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

    config = ModelConfig.from_dict(copy.deepcopy(ASSISTANTS[name]))
    model = Model(config)
    weights = {k: mx.array(v) for k, v in published_heads.assistant_tensors(name).items()}
    model.load_weights(list(model.sanitize(weights).items()))
    table = model.model.embed_tokens
    clusters = model.masked_embedding
    model._lm_head_fn = (
        table.as_linear if clusters is None else lambda rows: clusters(rows, table.weight)
    )
    shared = {kind: tuple(map(mx.array, pair)) for kind, pair in entries.items()}
    model.set_shared_kv(shared, length)

    def step(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        state, logits = model(mx.array(row)[None, None], shared, mx.array([[length]]))
        return np.array(state[0, 0]), np.array(logits[0, 0])

    return step


def _torch_assistant(name: str, entries: dict[str, np.ndarray], length: int) -> Any:
    import torch
    from transformers import AutoConfig, Gemma4AssistantForCausalLM

    values = {**copy.deepcopy(ASSISTANTS[name]), "model_type": "gemma4_assistant"}
    model = Gemma4AssistantForCausalLM(AutoConfig.for_model(**values))
    state = {k: torch.from_numpy(v) for k, v in published_heads.assistant_tensors(name).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.eval()
    shared = {kind: tuple(map(torch.from_numpy, pair)) for kind, pair in entries.items()}

    def step(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            found = model(
                inputs_embeds=torch.from_numpy(row)[None, None],
                position_ids=torch.tensor([[length]]),
                shared_kv_states=shared,
            )
        return found.last_hidden_state[0, 0].numpy(), found.logits[0, 0].numpy()

    return step


def _transfers() -> ModuleType:
    module: Any = ModuleType("hs_connectors")
    module.FileTransfer = module.HiddenStatesTransfer = object
    return module


def main() -> None:
    found = {name: record_speculators(name) for name in SPECULATORS}
    found |= {name: record_sidecar(name) for name in published_heads.SIDECARS}
    for name in ASSISTANTS:
        found[name] = record_assistant(name, LONG, is_torch=False)
        found[f"{name}, transformers"] = record_assistant(name, SHORT, is_torch=True)
    save_file(found, FILE)


if __name__ == "__main__":
    main()

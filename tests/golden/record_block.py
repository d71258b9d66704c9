"""Record what the reference packages compute for the layouts of `block_layouts.py`.

Run in an environment with dflash 0.1.0, mlx-dspark 0.20.3, mlx-vlm 0.7.10 and speculators 0.9.0:

    python -m tests.golden.record_block

Without arguments it checks that the first reference of each layout still gives the stored numbers,
and that its other references agree with it. With --write it stores them.
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden import block_layouts
from tests.golden.block_layouts import CHAIN, LENGTHS, ROOT, Floats, Layout, states, tensors

FILE = Path(__file__).with_name("block.npz")
TOLERANCE = 1e-4


class Recorded(NamedTuple):
    """Logits of each slot after the root, float32, shape (D, V), without and with the link.

    ``linked`` are those after the tokens of `CHAIN`, or with a selector, its path at temperature 0,
    one token per depth, as numbers. ``confidence`` are logits of the confidence head.
    """

    unary: Floats
    linked: Floats
    confidence: Floats


@contextmanager
def written(layout: Layout) -> Iterator[str]:
    """Write a layout as a folder with ``config.json`` and ``model.safetensors``."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors(layout), str(Path(folder) / "model.safetensors"))
        (Path(folder) / "config.json").write_text(json.dumps(layout.config))
        yield folder


class FakeTarget:
    """The parts of an mlx-lm model that the references bind."""

    def __init__(self) -> None:
        import mlx.core as mx
        import mlx.nn as nn

        embedding, head = map(mx.array, block_layouts.target_tables())
        self.embed_tokens = nn.Embedding(block_layouts.VOCAB, block_layouts.HIDDEN)
        self.embed_tokens.weight = embedding
        self.lm_head = nn.Linear(block_layouts.HIDDEN, block_layouts.VOCAB, bias=False)
        self.lm_head.weight = head
        self.model = self


def of_dflash(layout: Layout) -> Iterator[Recorded]:
    import mlx.core as mx

    package = importlib.import_module("dflash.model_mlx")
    package.snapshot_download = lambda folder, **_: folder
    with written(layout) as folder:
        draft = package.load_draft(folder).bind(FakeTarget())
    for length in LENGTHS:
        masks = [layout.config["dflash_config"]["mask_token_id"]] * (draft.config.block_size - 1)
        block, context = mx.array([[ROOT, *masks]]), mx.array(states(length))[None]
        hidden = draft.hidden_states(block, context, draft.make_cache(), 1)
        unary = draft.compute_logits(hidden)
        linked = mx.zeros((0,))
        if hasattr(draft, "candidate_selector"):
            linked = draft.candidate_selector.select(hidden, unary, mx.array([ROOT]), 0.0)[0][0]
        yield as_recorded(unary[0], linked)


def of_mlx_dspark(layout: Layout) -> Iterator[Recorded]:
    import mlx.core as mx

    load = importlib.import_module("mlx_dspark.load").load_drafter
    target = FakeTarget()
    with written(layout) as folder:
        drafter, config = load(folder, quantize=False)
    drafter.bind_embed(target.embed_tokens)
    drafter.bind_lm_head(target.lm_head)
    for length in LENGTHS:
        caches = drafter.make_ctx_cache()
        drafter.update_context(mx.array(states(length))[None], 0, caches)
        block = mx.array([[ROOT] + [config.mask_token_id] * (config.block_size - 1)])
        hidden = drafter.backbone(drafter.embed(block), length, caches)
        hidden = hidden[:, config.logits_start :]
        unary = drafter.compute_logits(hidden)[0]
        previous = mx.array([ROOT, *CHAIN][: len(unary)])
        linked = unary + drafter.markov_head.step_bias(previous)
        confidence = drafter.confidence_logits(hidden[0], previous)
        yield as_recorded(unary, linked, confidence)


def of_mlx_vlm(layout: Layout) -> Iterator[Recorded]:
    import mlx.core as mx

    is_dspark = "markov_rank" in layout.config
    names = ("qwen3_dspark", "DSpark") if is_dspark else ("qwen3_dflash", "DFlash")
    if "selector_rank" in layout.config.get("dflash_config", {}):
        names = "dflash2", "DFlash2"
    if layout.config["model_type"].endswith("_assistant"):
        names = "muse_glimmer_assistant", "MuseGlimmerAssistant"
    home = f"mlx_vlm.speculative.drafters.{names[0]}"
    package = importlib.import_module(home)
    configs = importlib.import_module(f"{home}.config")
    kinds = [getattr(configs, name) for name in vars(configs) if name.endswith(f"{names[1]}Config")]
    config = (kinds or [package.ModelConfig])[0].from_dict(dict(layout.config))
    draft = package.Model(config)
    weights = draft.sanitize({name: mx.array(one) for name, one in tensors(layout).items()})
    draft.load_weights(list(weights.items()))
    draft.validate_target_compatibility = lambda model: None
    draft.bind(FakeTarget())
    slot = 0 if is_dspark else 1
    num_masks = config.block_size - 1 - is_dspark  # with the token of the target itself
    for length in LENGTHS:
        block = mx.array([[ROOT] + [config.mask_token_id] * num_masks])
        hidden = draft._hidden(block, mx.array(states(length))[None], draft.make_cache())
        unary = draft._logits(hidden)[0, slot:]
        linked, confidence = mx.zeros((0,)), mx.zeros((0,))
        if is_dspark:
            previous = mx.array([ROOT, *CHAIN][: len(unary)])
            head = draft.markov_head
            linked = unary + head.markov_w2(head.markov_w1(previous))
            drafted = mx.array([CHAIN[: len(unary)]])
            chances = draft.confidence(hidden[:, slot:], mx.array([ROOT]), drafted)[0]
            confidence = mx.log(chances) - mx.log1p(-chances)
        elif hasattr(draft, "candidate_selector"):
            best = lambda scores: mx.argmax(scores, axis=-1)  # noqa: E731
            select = draft.candidate_selector.select
            linked = select(hidden[:, slot:], unary[None], mx.array([ROOT]), best)[0]
        yield as_recorded(unary, linked, confidence)


def of_speculators(layout: Layout) -> Iterator[Recorded]:
    """Run the training model of speculators, each length as one anchor of a longer text."""
    import torch

    method = layout.config["speculators_model_type"]
    core = importlib.import_module(f"speculators.models.{method}.core")
    shared = importlib.import_module("speculators.models.dflash.core")
    name = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[method]
    config_class = getattr(core, f"{name}SpeculatorConfig", None) or getattr(
        importlib.import_module(f"speculators.models.{method}"), f"{name}SpeculatorConfig"
    )
    config = config_class(**json.loads(json.dumps(layout.config)))
    config.transformer_layer_config._attn_implementation = "eager"
    model = getattr(core, f"{name}DraftModel")(config).eval()
    embedding, head = block_layouts.target_tables()
    weights: dict[str, Any] = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    weights |= tensors(layout)
    model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    size, slot = model.block_size, int(not config.sample_from_anchor)
    for length in LENGTHS:
        shared.select_anchors = lambda *_, at=length: (torch.tensor([at]), torch.tensor([True]))
        total = length + 2 * size
        tokens = torch.zeros((1, total), dtype=torch.long)
        tokens[0, length] = ROOT
        with torch.no_grad():
            hidden, unary, *_ = model._backbone_forward(
                torch.tensor(states(total))[None],
                tokens,
                torch.ones((1, total)),
                torch.zeros((1, total, block_layouts.HIDDEN)),
                torch.zeros((1, total), dtype=torch.long),
                max_anchors=1,
            )
            unary, hidden = unary[0, slot:], hidden[0, slot:]
            yield _linked(model, torch, hidden, unary)


def _linked(model: Any, torch: Any, hidden: Any, unary: Any) -> Recorded:
    """Add the link of a model of speculators to its logits."""
    chain = torch.tensor([ROOT, *CHAIN][: len(unary)])
    linked, confidence = torch.zeros(0), torch.zeros(0)
    if getattr(model, "markov_head", None) is not None:
        bias = model.markov_head.block_bias(prev_token_ids=chain[None], hidden_states=hidden[None])
        linked = unary + bias[0]
        embedded = model.markov_head.prev_embeddings(chain)
        confidence = model.confidence_head(torch.cat([hidden, embedded], dim=-1))
    elif hasattr(model, "candidate_selector"):
        # The scores of all candidates after the tokens of the chain; others keep their logits.
        selector = model.candidate_selector
        ids = unary.topk(selector.top_k, dim=-1).indices
        scores = selector.score_candidates(unary[None], hidden[None], chain[None], ids[None])[0]
        linked = unary.scatter(-1, ids, scores)
    return as_recorded(unary, linked, confidence)


def as_recorded(unary: Any, linked: Any, confidence: Any = ()) -> Recorded:
    """Convert the arrays of any package."""
    return Recorded(*(np.array(one, dtype=np.float32) for one in (unary, linked, confidence)))


REFERENCES: dict[str, Callable[[Layout], Iterator[Recorded]]] = {
    block_layouts.ZLAB: of_dflash,
    block_layouts.DSPARK: of_mlx_dspark,
    block_layouts.VLM: of_mlx_vlm,
    block_layouts.SPECULATORS: of_speculators,
}


def record() -> dict[str, Floats]:
    """Run every reference; raise `AssertionError` where two of one layout disagree."""
    stored: dict[str, Floats] = {}
    for name, layout in block_layouts.LAYOUTS.items():
        first, *others = (list(REFERENCES[one](layout)) for one in layout.references)
        for other in others:
            for one, two in zip(first, other, strict=True):
                for a, b in zip(one, two, strict=True):
                    if a.size and b.size:
                        np.testing.assert_allclose(a, b, atol=TOLERANCE, err_msg=name)
        for length, found in zip(LENGTHS, first, strict=True):
            for part, values in zip(Recorded._fields, found, strict=True):
                if values.size:
                    stored[f"{name}/{length}/{part}"] = values
    return stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Store the numbers.")
    found = record()
    if parser.parse_args().write:
        np.savez_compressed(FILE, **found)
        return
    with np.load(FILE) as stored:
        assert set(stored) == set(found)
        for key, values in found.items():
            np.testing.assert_allclose(stored[key], values, atol=TOLERANCE, err_msg=key)


if __name__ == "__main__":
    main()

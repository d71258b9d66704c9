"""Heads as published: what their authors' packages compute, Gemma 4 assistants, damaged files."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checkpoints.loading import load_drafter
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.errors import CheckpointError, RedrafterError, UnsupportedTargetError
from mlx_redrafter.proposers.assistant import load as load_assistant
from mlx_redrafter.proposers.assistant.network import Assistant
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.surroundings import DecodingSurroundings, Surrounding
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle import load as load_eagle
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kind import TargetFacts
from mlx_redrafter.proposers.kv_drafting import KvNetwork, _Levels
from mlx_redrafter.proposers.layer_sizes import FULL, SLIDING
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.quantization import FLOAT_MODES, quantization_of, quantize_drafter
from mlx_redrafter.proposers.specformer import SpecFormer, SpecFormerConfig
from mlx_redrafter.proposers.specformer import load as load_specformer
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from mlx_redrafter.target.target import Target
from tests.golden.block_layouts import LAYOUTS, tensors
from tests.golden.record_heads import FILE, LONG, SHORT
from tests.helpers import published_heads
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.equality import assert_same_weights, ids, stock_tokens, tokens
from tests.helpers.flights import flight_of
from tests.helpers.medusa import random_medusa, with_static_tree
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.helpers.mtp import family_config, module_tensors, write
from tests.helpers.published_heads import (
    ASSISTANTS,
    NUM_DRAFTS,
    SPECULATORS,
    assistant_tensors,
    speculators_head,
)
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config
from tests.models.trees import rows_of
from tests.property.test_lossless_networks import PROMPT, TREE, tip
from tests.property.test_lossless_networks import assistant as new_assistant

CLUSTERED = "assistant with clusters"


@pytest.fixture(params=ASSISTANTS)
def assistant(request: pytest.FixtureRequest) -> Any:
    return new_assistant(None, request.param)


def test_the_copied_entries_are_the_targets(assistant, monkeypatch):
    """After prompts in chunks, accepted and rejected drafts, and turns on one prompt cache."""
    model = build(tiny_config("gemma4_text"))
    full, sliding, _ = assistant.captured_layers(Target(model))
    stock, cache = make_prompt_cache(model), make_prompt_cache(model)
    own = make_prompt_cache(assistant)
    text: list[int] = []
    for turn in (PROMPT, [60, 7]):
        expected = ids(stock_tokens(model, turn, 12, prompt_cache=stock))
        tip(monkeypatch, [turn[-1:] + expected], VOCAB_SIZE)
        options = {"max_tokens": 12, "prompt_cache": cache + own, "prefill_step_size": 4}
        assert tokens(model, turn, assistant, **options, **TREE) == expected
        text += turn + expected
        if turn is PROMPT:
            fresh = make_prompt_cache(model)
            model(mx.array([text]), cache=fresh)
            for layer, copy in zip((full, sliding), own, strict=True):
                assert copy.offset == len(text) - 1
                for rows, found in zip(rows_of(fresh[layer]), rows_of(copy), strict=True):
                    num = min(rows.shape[2], 7)
                    wanted = rows[..., -num:-1, :]
                    assert mx.allclose(found[..., 1 - num :, :], wanted, atol=1e-4).item()
    # Every turn leaves out one entry.
    assert {layer.offset for layer in own} == {len(text) - 2}


def test_other_targets_are_refused(assistant):
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    with pytest.raises(UnsupportedTargetError, match="expected a Gemma 4 target with full_att"):
        assistant.check_fit(Target(build(tiny_config("llama"))), tokenizer)
    narrow = build({**tiny_config("gemma4_text"), "head_dim": 8})
    with pytest.raises(CheckpointError, match="sliding_attention has 4 heads of size 16, which do"):
        assistant.check_fit(Target(narrow), tokenizer)


def changed(**values: Any) -> dict[str, Any]:
    config = ASSISTANTS[CLUSTERED]
    text = {k: v for k, v in values.items() if k in config["text_config"]}
    rest = {k: v for k, v in values.items() if k not in text}
    return {**config, **rest, "text_config": {**config["text_config"], **text}}


def test_contradicting_configs_are_refused(tmp_path):
    for config, message in (
        ({"model_type": "gemma4_assistant"}, "expected an object text_config .* found none"),
        (changed(backbone_hidden_size=0), "backbone_hidden_size must be an integer from 1"),
        (changed(num_centroids=13), "a multiple of num_centroids, got 96 and 13"),
        (changed(centroid_intermediate_top_k=40), "centroid_intermediate_top_k must be an integer"),
        (changed(layer_types=["full_attention"]), "layer_types must be .* for each of 3 layers"),
        (changed(hidden_size=2**40), "hidden_size must be an integer from 1"),
        (changed(tie_word_embeddings=False), "use_ordered_embeddings needs tie_word_embeddings"),
        (changed(enable_moe_block=True), "enable_moe_block must be absent or 0"),
        (changed(intermediate_size=41), r"mlp.gate_proj.weight' has shape \[40, 24\], expected"),
    ):
        write(tmp_path, assistant_tensors(CLUSTERED), config)
        with pytest.raises(CheckpointError, match=message):
            load_assistant(tmp_path)
    tensors = assistant_tensors(CLUSTERED)
    tensors["masked_embedding.token_ordering"][0] += 1
    write(tmp_path, tensors, ASSISTANTS[CLUSTERED])
    with pytest.raises(CheckpointError, match="expected every id from 0 to 95 once"):
        load_assistant(tmp_path)
    with pytest.raises(CheckpointError, match="vocab_size 96 does not match the target's 90"):
        load_assistant(tmp_path, TargetFacts("x", 64, 90))


TOLERANCE = 1e-4
RECORDED = mx.load(str(FILE))


@pytest.mark.parametrize("name", SPECULATORS)
def test_heads_of_speculators_have_its_logits(name, tmp_path):
    """After texts within and beyond the window, and after one to three drafts."""
    tensors = speculators_head(name)
    write(tmp_path, tensors, SPECULATORS[name])
    assert recognise(tmp_path)[0].NAME == "EAGLE head"
    head = load_eagle(tmp_path)
    table = mx.array(tensors["embed_tokens.weight"])
    target: Any = SimpleNamespace(modules=SimpleNamespace(embed=lambda tokens: table[tokens]))
    text, states = published_heads.text_and_states()
    expected = np.array(nn.log_softmax(mx.array(RECORDED[name]), axis=-1))
    for end in (2, 4, 7, len(states) - NUM_DRAFTS):
        drafting: Any = head.open(target, text[:end], True, [])
        drafting.reader.read(mx.array(states[: end - 1]))
        last = slice(end - 1, end)
        flight = flight_of(text[last], 0, text[end], end - 1, mx.array(states[last]))
        if not head.is_joint:
            found = head.parallel_scores(drafting, flight, 1 + NUM_DRAFTS)
        else:
            levels = _Levels([(drafting, flight)])
            rows = [levels.first()]
            for depth in range(1, 1 + NUM_DRAFTS):
                draft = mx.array(text[end + depth : end + depth + 1])
                rows.append(levels.following(None, draft, depth))
            found = mx.concatenate(rows)
        assert np.allclose(np.array(found), expected[:, end - 1], atol=TOLERANCE), end


@pytest.mark.parametrize("name", published_heads.SIDECARS)
def test_modules_that_mlx_vlm_splits_off_have_its_outputs(name, tmp_path):
    """From codes as well, which MLX computes alike in the splitter and here."""
    model_type, mode = published_heads.SIDECARS[name]
    config = family_config(model_type)
    module, stored = load_mtp(write(tmp_path / "published", module_tensors(config), config)), None
    if mode is not None:
        size, bits = FLOAT_MODES[mode]
        stored = {"group_size": size, "bits": bits, "mode": mode}

        def is_coded(name: str, layer: Any) -> bool:
            """Whether mlx-vlm's splitters quantise a layer: matrices except those of routers."""
            is_matrix = hasattr(layer, "to_quantized") and layer.weight.shape[-1] % size == 0
            return is_matrix and not name.endswith("mlp.gate")

        nn.quantize(module, size, bits, mode=mode, class_predicate=is_coded)
    save_drafter(module, tmp_path / "sidecar")
    assert recognise(tmp_path / "sidecar")[0].NAME == "MTP module"
    module = load_mtp(tmp_path / "sidecar")
    assert quantization_of(module) == stored
    hidden, embeddings = (mx.array(rows) for rows in published_heads.pairs(config["hidden_size"]))
    outputs = module.norm(module(hidden, embeddings, module.make_cache()))
    assert np.allclose(np.array(outputs), np.array(RECORDED[name]), atol=TOLERANCE)


@pytest.mark.parametrize("reference", ["mlx-vlm", "transformers"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_assistants_have_the_logits_of_mlx_vlm_and_transformers(name, reference, tmp_path):
    """Within the window, and in mlx-vlm beyond it; transformers' window is two tokens wider."""
    write(tmp_path, assistant_tensors(name), ASSISTANTS[name])
    assert recognise(tmp_path)[0].NAME == "Gemma 4 assistant"
    assistant = load_assistant(tmp_path)
    assistant.hook()
    length = LONG if reference == "mlx-vlm" else SHORT
    expected = np.array(RECORDED[name if length == LONG else f"{name}, transformers"])
    entries, inputs = published_heads.assistant_inputs(length)
    rows = mx.arange(length)
    contexts = [
        (*map(mx.array, entries[kind]), seen)
        for kind, seen in ((FULL, rows >= 0), (SLIDING, rows > length - 8))
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


WIDE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
# A network of each kind, by the name of the kind.
NETWORKS: dict[str, Callable[[], Any]] = {
    "recurrent drafter": lambda: random_drafter(64, 32, draft_vocab_size=10),
    "Medusa heads": lambda: with_static_tree(random_medusa(num_heads=2, draft_vocab_size=40)),
    "EAGLE head": lambda: Eagle(EagleConfig(1, **WIDE)),
    "SpecFormer": lambda: SpecFormer(
        SpecFormerConfig(**WIDE, captured_layers=(0, 1, 1, -1), num_slots=4, head_dim=8)
    ),
    "block drafter": lambda: random_block(block_config(64, 32, **LINKS["gated"])),
    "Gemma 4 assistant": lambda: new_assistant(None, CLUSTERED),
}


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", NETWORKS)
def test_what_is_written_is_read_back(kind, bits, tmp_path):
    network = NETWORKS[kind]()
    if bits is not None:
        quantize_drafter(network, bits, 32)
    save_drafter(network, tmp_path)
    assert recognise(tmp_path)[0].NAME == kind
    again = load_drafter(tmp_path)
    assert again.config == network.config
    assert quantization_of(again) == quantization_of(network)
    assert_same_weights(again, network)


@pytest.mark.parametrize("kind", NETWORKS)
def test_targets_of_other_sizes_are_refused(kind):
    target, tokenizer = Target(tiny_llama(vocab_size=99)), wrapped_tokenizer(99)
    with pytest.raises(CheckpointError, match="size 64 does not match the target's"):
        NETWORKS[kind]().check_fit(target, tokenizer)


Files = tuple[dict[str, Any], dict[str, mx.array]]
NUM_FILES = 12
NUMBERS: tuple[Any, ...] = (None, 0, -1, 1, 3, 2**40, 0.5, 1e308, True)
WEIRD = (*NUMBERS, "", "x", [], [1, 2], {}, {"a": 1})
SIZES = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, mx.array]:
    return {name: mx.array(tensor) for name, tensor in tensors.items()}


def eagle_files(version: int) -> Files:
    head = Eagle(EagleConfig(version=version, **SIZES, **HEADS))
    return {"model_type": "llama", "bias": False, **SIZES, **HEADS}, named_parameters(head)


def own_files(network: SpecFormer | BlockNetwork) -> Files:
    """A network as `convert` or training writes it."""
    return network.config.to_dict(), named_parameters(network)


def converted(folder: Path) -> Mtp:
    """A module as it comes through the converter."""
    out = folder / "out"
    convert_drafter(folder, out, ConversionOptions(dtype="float32"))
    return load_mtp(out)


# Published files, and what reads them; block drafters of packagings that different code reads.
BLOCKS = ("z-lab scales", "incoai", "DeepSpec Gemma 4", "Meta", "speculators DSpark gated")
FAMILIES = ("mimo", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe", "nemotron_h")
SPECFORMER = SpecFormerConfig(**SIZES, **HEADS, captured_layers=(0, -1), num_slots=3)
SEEDS: dict[str, tuple[Callable[[], Files], Callable[[Path], KvNetwork]]] = {
    "EAGLE-1": (lambda: eagle_files(1), load_eagle),
    "EAGLE-3": (lambda: eagle_files(3), load_eagle),
    "SpecFormer": (lambda: own_files(SpecFormer(SPECFORMER)), load_specformer),
    **{
        name: (lambda own=LAYOUTS[name]: (own.config, arrays_of(tensors(own))), load_block)
        for name in BLOCKS
    },
    "DFlash 2, converted": (
        lambda: own_files(random_block(block_config(24, 8, head_dim=4, **LINKS["DFlash 2"]))),
        load_block,
    ),
    **{
        f"speculators {name}": (
            lambda name=name: (SPECULATORS[name], arrays_of(speculators_head(name))),
            load_eagle,
        )
        for name in ("windows", "parallel")
    },
    CLUSTERED: (
        lambda: (ASSISTANTS[CLUSTERED], arrays_of(assistant_tensors(CLUSTERED))),
        load_assistant,
    ),
    **{
        f"{name}{how}": (
            lambda name=name: (family_config(name), module_tensors(family_config(name))),
            converted if how else load_mtp,
        )
        for names, how in ((FAMILIES, ""), (("mimo", "glm4_moe_lite", "qwen3_5"), ", converted"))
        for name in names
    },
}


def damage(files: Files, chance: random.Random) -> Files:
    """The same files with one to three things changed."""
    config, tensors = dict(files[0]), dict(files[1])
    for _ in range(chance.randint(1, 3)):
        name, key = chance.choice(sorted(tensors)), chance.choice(sorted(config))
        tensor = tensors[name]
        if isinstance(config[key], dict) and config[key] and chance.random() < 0.7:
            inner = chance.choice(sorted(config[key]))
            config[key] = {**config[key], inner: chance.choice(WEIRD)}
            continue
        match chance.randrange(9):
            case 0 | 1 | 2:
                config[key] = chance.choice(WEIRD)
            case 3:
                del config[key]
            case 4:
                key = chance.choice(("quantization", "text_config", "rope_scaling"))
                objects = {"bits": 4, "group_size": 64}, {"type": "yarn"}
                config[key] = chance.choice((*WEIRD, *objects))
            case 5:
                del tensors[name]
            case 6:
                tensors[name] = mx.zeros(chance.choice(((), (0,), (3,), (2, 3), (2, 2, 2))))
            case 7:
                tensors[name] = tensor.astype(chance.choice((mx.int32, mx.uint8, mx.float16)))
            case _:
                tensors[name + chance.choice((".scales", ".biases", "_scale_inv", ".0"))] = tensor
        if not tensors or not config:
            break
    return config, tensors


def run(load: Callable[[Path], KvNetwork], folder: Path) -> str | None:
    """Load a network and let it process two pairs; the message if it is refused."""
    try:
        network = load(folder)
    except RedrafterError as error:
        return str(error)
    hidden = network.config.hidden_size
    if isinstance(network, Assistant):
        sizes = {one.layer_type: one.self_attn.head_dim for one in network.model.layers}
        contexts = [
            (*[mx.ones((1, 1, 2, sizes.get(kind, 2)))] * 2, mx.array([True, True]))
            for kind in (FULL, SLIDING)
        ]
        rows = network(mx.ones((2, hidden)), mx.ones((2, hidden)), contexts)
        mx.eval(network.logits(rows, None), network.feed_back(rows))
        return None
    count = 1
    if isinstance(network, Eagle):
        count = network.config.num_captured
    elif isinstance(network, (SpecFormer, BlockNetwork)):
        count = len(network.config.captured_layers)
    rows = network.fuse(mx.ones((2, hidden * count)))
    caches = network.make_cache()
    outputs = network(rows, mx.ones((2, hidden)), caches)
    if isinstance(network, BlockNetwork):
        root, block = mx.array([2]), mx.ones((1, network.config.block_size, hidden))
        part = Surrounding(caches, rows[:1], 2, 2, root)
        outputs = network.outputs(block, DecodingSurroundings([part], block.shape[1]))
    mx.eval(network.slots(outputs, 2) if isinstance(network, SpecFormer) else outputs)
    return None


@pytest.mark.parametrize("kind", SEEDS)
def test_damaged_files_are_refused_in_one_line(tmp_path, kind):
    """What loads must run."""
    for seed in range(NUM_FILES):
        make, load = SEEDS[kind]
        chance = random.Random(seed)
        config, tensors = damage(make(), chance)
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), tensors)
        if chance.random() < 0.2:
            content = bytearray(path.read_bytes())
            for _ in range(3):
                content[chance.randrange(min(len(content), 2000))] ^= 1 << chance.randrange(8)
            path.write_bytes(content[: chance.choice((len(content), len(content) // 2))])
        (tmp_path / "config.json").write_text(json.dumps(config))
        message = run(load, tmp_path)
        assert message is None or len(message.splitlines()) == 1

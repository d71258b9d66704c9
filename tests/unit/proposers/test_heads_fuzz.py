"""Damaged files of heads that read the text: loaded or refused in one line, nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.convert.conversion import convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.proposers.assistant import load as load_assistant
from mlx_redrafter.proposers.assistant.config import FULL, SLIDING
from mlx_redrafter.proposers.assistant.network import Assistant
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.surroundings import DecodingSurroundings, Surrounding
from mlx_redrafter.proposers.eagle import load as load_eagle
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kv_drafting import KvNetwork
from mlx_redrafter.proposers.mtp import load as load_mtp
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.specformer import load as load_specformer
from mlx_redrafter.proposers.specformer.config import SpecFormerConfig
from mlx_redrafter.proposers.specformer.network import SpecFormer
from tests.golden.block_layouts import LAYOUTS, tensors
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.mtp import family_config, module_tensors
from tests.helpers.published_heads import (
    ASSISTANTS,
    SPECULATORS,
    assistant_tensors,
    speculators_head,
)

Files = tuple[dict[str, Any], dict[str, mx.array]]
NUM_FILES, CLUSTERED = 12, "assistant with clusters"
WEIRD: tuple[Any, ...] = (
    *(None, 0, -1, 1, 3, 2**40, 0.5, 1e308, True, "", "x"),
    *([], [1, 2], {}, {"a": 1}),
)
SIZES = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, mx.array]:
    return {name: mx.array(tensor) for name, tensor in tensors.items()}


def eagle_files(version: int) -> Files:
    """A published EAGLE head."""
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
    "assistant": (
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
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
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

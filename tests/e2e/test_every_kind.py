"""What holds for drafters of every kind: threads, caches, batches, commands, the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Engine, load, proposers
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checkpoints.recognition import find_kind
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers import block
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.specformer.config import SpecFormerConfig
from mlx_redrafter.proposers.specformer.network import SpecFormer
from tests.helpers import mimo, toy
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.cli import run
from tests.helpers.medusa import random_medusa
from tests.helpers.models import fast_tokenizer, random_drafter
from tests.server.serving import KEY, serving

VOCAB_SIZE = 264
CONFIG = {**mimo.CONFIG, "vocab_size": VOCAB_SIZE, "eos_token_id": 0}
PROMPTS = ["Once upon a time", "abc abc abc abc", "Lily"]
SHAPES: list[dict[str, Any]] = [
    {},
    {"beam_width": 1, "beam_length": 4},
    {"beam_width": 3, "beam_length": 3},
]
# Read from the file; one is of another range than the networks themselves have.
CALIBRATION: dict[str, Any] = {"inverse_temperature": 1.7, "coupling_weight": 0.9}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A random MiMo with a tokenizer and the tensors of its MTP module."""
    model = named_parameters(mimo.tiny_mimo(config=config))
    mimo.write(folder, {**model, **mimo.module_tensors(config)}, config)
    fast_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def write_eagle(folder: Path, version: int) -> Path:
    sizes = {"hidden_size": 32, "vocab_size": VOCAB_SIZE, "intermediate_size": 32}
    layers = {"captured_layers": (0, 1, 1)} if version == 3 else {}
    mx.random.seed(version)
    config = EagleConfig(version, num_attention_heads=4, num_key_value_heads=2, **sizes, **layers)
    save_drafter(Eagle(config), folder)
    return folder


def write_specformer(folder: Path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "vocab_size": VOCAB_SIZE, "intermediate_size": 32}
    mx.random.seed(5)
    config = SpecFormerConfig(**sizes, **heads, captured_layers=(0, 1, 1, -1), num_slots=5)
    save_drafter(SpecFormer(config), folder)
    return folder


def write_heads(folder: Path, heads: Any) -> Path:
    save_drafter(heads, folder)
    return folder


def write_toy(folder: Path) -> Path:
    network = toy.Toy(toy.ToyConfig(VOCAB_SIZE, 32))
    network.table = mx.random.normal((VOCAB_SIZE, VOCAB_SIZE), scale=3.0, key=mx.random.key(6))
    save_drafter(network, folder)
    return folder


KINDS: dict[str, Callable[[Path], Path | str]] = {
    "recurrent": lambda folder: write_heads(folder, random_drafter(VOCAB_SIZE, 32, **CALIBRATION)),
    "recurrent, fused": lambda folder: write_heads(
        folder, random_drafter(VOCAB_SIZE, 32, captured_layers=(0, 1, -1))
    ),
    "EAGLE-1": lambda folder: write_eagle(folder, 1),
    "EAGLE-3": lambda folder: write_eagle(folder, 3),
    "Medusa": lambda folder: write_heads(folder, random_medusa(VOCAB_SIZE, 32, **CALIBRATION)),
    "MTP": lambda folder: "mtp",
    "SpecFormer": write_specformer,
    "DFlash 2": lambda folder: write_heads(
        folder, random_block(block_config(VOCAB_SIZE, 32, **LINKS["DFlash 2"]))
    ),
    "toy": write_toy,
    "draft model": lambda folder: write_model(folder, {**CONFIG, "num_hidden_layers": 1}),
    "lookup": lambda folder: "lookup",
}


@pytest.fixture(scope="module", autouse=True)
def _one_more_kind() -> Iterator[None]:
    """The entry that a new kind needs in the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposers, "KINDS", (*proposers.KINDS, toy))
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), CONFIG)


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return KINDS[request.param](tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def engines(target: Path, drafter: Any) -> tuple[Engine, Engine]:
    """With the drafter, and plain."""
    model, tokenizer, loaded = load(target, drafter=drafter)
    return Engine(model, tokenizer, loaded), Engine(model, tokenizer, None)


def test_threads_share_an_engine_which_learns(engines: tuple[Engine, Engine]) -> None:
    """Sampled with the target's noise, one text greedy; with the sizes of drafts left to auto."""
    drafted, plain = engines
    options: list[dict[str, Any]] = [{}, {"temp": 0.8, "seed": 1}, {"temp": 1.0, "seed": 2}]

    def work(engine: Engine, i: int) -> list[int]:
        return [r.token for r in engine.stream(PROMPTS[i], max_tokens=24, **options[i])]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: work(drafted, i), range(3)))
    assert found == [work(plain, i) for i in range(3)]
    first = drafted.memory.experience
    assert first is not None
    assert work(drafted, 1) == found[1]
    assert drafted.memory.experience is not first


def test_turns_on_one_prompt_cache(engines: tuple[Engine, Engine]) -> None:
    caches = [engine.new_prompt_cache() for engine in engines]
    for turn, shape in zip(PROMPTS, SHAPES, strict=True):
        options: dict[str, Any] = {"temp": 0.8, "seed": 4, "max_tokens": 9}
        found, expected = (
            [r.token for r in engine.stream(turn, prompt_cache=cache, **options, **more)]
            for engine, cache, more in zip(engines, caches, (shape, {}), strict=True)
        )
        assert found == expected


def test_texts_that_share_their_passes(engines: tuple[Engine, Engine]) -> None:
    drafted, plain = engines
    options: dict[str, Any] = {"temp": 0.8, "seed": 4, "max_tokens": 12}
    texts = [""] * len(PROMPTS)
    for number, response in drafted.stream_batch(PROMPTS, batch_size=2, **options):
        texts[number] += response.text
    assert texts == [plain.generate(prompt, **options) for prompt in PROMPTS]


def test_the_server(engines: tuple[Engine, Engine]) -> None:
    drafted, plain = engines
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0.8, "seed": 4}
    with serving(drafted) as served:
        status, answer = served.send("/v1/completions", body, KEY)
    assert status == 200
    options: dict[str, Any] = {"temp": 0.8, "seed": 4, "max_tokens": 12}
    assert answer["choices"][0]["text"] == plain.generate(PROMPTS[0], **options)


def test_check_and_compare(
    target: Path,
    drafter: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Times of tiny models are of no use, and take most of the time.
    monkeypatch.setattr("mlx_redrafter.bench.compare.time_shapes", lambda *_: None)
    pair = ("--model", target, "--drafter", drafter, "--temp", 0.8, "-m", 6)
    result = run(capsys, "check", *pair, "-p", PROMPTS[0], "-p", PROMPTS[1])
    is_block = find_kind(drafter) is block
    assert (result.code, result.out.count("equal: 6 tokens")) == (0, 2)
    assert ("decoding 4 texts" in result.err) == (result.err != "") == is_block
    assert ("first drafts accepted by reading of the config" in result.out) == is_block
    (tmp_path / "prompts.txt").write_text("abc abc\n")
    out = tmp_path / "compare.json"
    options = ("--prompts", tmp_path / "prompts.txt", "--repeats", 1, "-o", out)
    result = run(capsys, "bench", "compare", *pair, *options)
    assert result.code == 0, result.err
    rows = json.loads(out.read_text())["found"]["rows"]
    assert {row["num_different"] for row in rows if "auto" in row["arm"]} == {0}


def test_a_new_kind_needs_a_folder_and_an_entry(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading, generating, and inspection; the tests above have the rest."""
    folder = write_toy(tmp_path / "toy")
    network = load(target, drafter=folder)[2]
    assert isinstance(network, toy.Toy)
    pair = ("--model", target, "--prompt", PROMPTS[0], "-m", 12, "--temp", 0)
    drafted = run(capsys, "generate", *pair, "--drafter", folder, "--beam-width", 2, "--json")
    plain = run(capsys, "generate", *pair, "--drafter", "none", "--json")
    assert (drafted.code, drafted.err) == (0, "")
    assert json.loads(drafted.out)["text"] == json.loads(plain.out)["text"]
    inspected = run(capsys, "convert", "inspect", folder)
    assert inspected.code == 0
    assert f"{toy.NAME}, which `load` reads as it is" in " ".join(inspected.out.split())
    refused = run(capsys, "convert", folder, tmp_path / "out")
    assert refused.code != 0
    assert toy.NAME in refused.err


def test_a_new_kind_checks_sizes_before_weights(target: Path, tmp_path: Path) -> None:
    save_drafter(toy.Toy(toy.ToyConfig(VOCAB_SIZE, 48)), tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size 48 does not match the target's 32"):
        load(target, drafter=tmp_path)

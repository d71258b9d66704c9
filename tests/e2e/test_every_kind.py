"""What holds for drafters of every kind: threads, caches, batches, commands, the server."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_redrafter import Engine, Grammar, device_read, load, proposers
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checkpoints.recognition import find_kind
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import Lane, propose_all
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers import block
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.draft_network import NetworkDrafting
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.specformer import SpecFormer, SpecFormerConfig
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers import mtp, toy
from tests.helpers.block import LINKS, block_config, random_block
from tests.helpers.few_shapes import compile_passes
from tests.helpers.medusa import random_medusa
from tests.helpers.models import fast_tokenizer, random_drafter
from tests.server.serving import serving

VOCAB_SIZE = 264
CONFIG = {**mtp.MIMO, "vocab_size": VOCAB_SIZE, "eos_token_id": 0}
PROMPTS = ["Once upon a time", "abc abc abc abc", "Lily"]
SHAPES: list[dict[str, Any]] = [
    {}, {"beam_width": 1, "beam_length": 4}, {"beam_width": 3, "beam_length": 3},
]  # fmt: skip
# Read from the file; one is of another range than the networks themselves have.
CALIBRATION: dict[str, Any] = {"inverse_temperature": 1.7, "coupling_weight": 0.9}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A random MiMo with a tokenizer and the tensors of its MTP module."""
    model = named_parameters(mtp.tiny_mimo(config=config))
    mtp.write(folder, {**model, **mtp.module_tensors(config)}, config)
    fast_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 32, "vocab_size": VOCAB_SIZE, "intermediate_size": 32, **HEADS}


def write_heads(folder: Path, make: Callable[[], Any]) -> Path:
    mx.random.seed(5)
    save_drafter(make(), folder)
    return folder


def make_toy() -> toy.Toy:
    network = toy.Toy(toy.ToyConfig(VOCAB_SIZE, 32))
    network.table = mx.random.normal((VOCAB_SIZE, VOCAB_SIZE), scale=3.0, key=mx.random.key(6))
    return network


# What makes the network of each kind.
KINDS: dict[str, Callable[[], Any]] = {
    "recurrent": lambda: random_drafter(VOCAB_SIZE, 32, **CALIBRATION),
    "EAGLE-1": lambda: Eagle(EagleConfig(1, **SIZES)),
    "EAGLE-3": lambda: Eagle(EagleConfig(3, **SIZES, captured_layers=(0, 1, 1))),
    "Medusa": lambda: random_medusa(VOCAB_SIZE, 32, **CALIBRATION),
    "SpecFormer": lambda: SpecFormer(
        SpecFormerConfig(**SIZES, captured_layers=(0, 1, 1, -1), num_slots=5)
    ),
    "DFlash 2": lambda: random_block(block_config(VOCAB_SIZE, 32, **LINKS["DFlash 2"])),
    "toy": make_toy,
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


@pytest.fixture(scope="module", params=[*KINDS, "mtp", "draft model", "lookup"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("drafter")
    if request.param == "draft model":
        return write_model(folder, {**CONFIG, "num_hidden_layers": 1})
    known = KINDS.get(request.param)
    return request.param if known is None else write_heads(folder, known)


@pytest.fixture(scope="module")
def engines(target: Path, drafter: Any) -> tuple[Engine, Engine]:
    """With the drafter, and plain."""
    model, tokenizer, loaded = load(target, drafter=drafter)
    return Engine(model, tokenizer, loaded), Engine(model, tokenizer, None)


def test_threads_share_an_engine_which_learns(engines):
    """Sampled with the target's noise, one text greedy; with the sizes of drafts left to auto."""
    drafted, plain = engines
    options: list[dict[str, Any]] = [{}, {"temp": 0.8, "seed": 1}, {"temp": 1.0, "seed": 2}]

    def work(engine: Engine, i: int) -> list[int]:
        return [r.token for r in engine.stream(PROMPTS[i], max_tokens=24, **options[i])]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: work(drafted, i), range(3)))
    assert found == [work(plain, i) for i in range(3)]
    first = drafted.memory.policy
    assert first is not None
    assert work(drafted, 1) == found[1]
    assert drafted.memory.policy is not first


def test_turns_on_one_prompt_cache(engines):
    caches = [engine.new_prompt_cache() for engine in engines]
    for turn, shape in zip(PROMPTS, SHAPES, strict=True):
        options: dict[str, Any] = {"temp": 0.8, "seed": 4, "max_tokens": 9}
        found, expected = (
            [r.token for r in engine.stream(turn, prompt_cache=cache, **options, **more)]
            for engine, cache, more in zip(engines, caches, (shape, {}), strict=True)
        )
        assert found == expected


def mixed_texts() -> list[dict[str, Any]]:
    """Options of texts that have little in common."""
    ending = Grammar.regex("[a-f]{3,9}[0-9]{2}")
    return [
        {"prompt": PROMPTS[0]},
        {"prompt": PROMPTS[1], "temp": 0.8, "seed": 4, **SHAPES[2]},
        {"prompt": PROMPTS[2] * 9, "temp": 0.8, "seed": 5, "prefill_step_size": 7, **SHAPES[1]},
        {"prompt": PROMPTS[0], "temp": 1.0, "seed": 6, "grammar": ending},
        {"prompt": PROMPTS[1], "grammar": ending, **SHAPES[2]},
        {"prompt": PROMPTS[2], "logits_processors": make_logits_processors(repetition_penalty=1.5)},
        {"prompt": "c ab", "history": [list(range(40, 60))], **SHAPES[1]},
        {"prompt": PROMPTS[1], "sampler": make_sampler(0.0), **SHAPES[2]},
        {"prompt": PROMPTS[2], "temp": 0.8, "seed": 4, "top_p": 0.9, "couple": False, **SHAPES[2]},
    ]


def test_texts_of_any_kind_share_their_passes(engines):
    """They come and go, one after a kept prefix; some are cut off, and one is cancelled."""
    drafted, plain = engines
    rng, shared, texts = random.Random(2), drafted.share(), mixed_texts()
    caches = [engine.new_prompt_cache() for engine in engines]
    for engine, cache in zip(engines, caches, strict=True):
        engine.generate("A kept prefix", prompt_cache=cache, max_tokens=4)
    expected = [[r.token for r in plain.stream(**options, max_tokens=10)] for options in texts]
    again: dict[str, Any] = {"prompt": " goes on", "max_tokens": 10}
    expected.append([r.token for r in plain.stream(prompt_cache=caches[1], **again)])
    streams = [drafted.stream(**options, max_tokens=10, shared=shared) for options in texts]
    streams.append(drafted.stream(prompt_cache=caches[0], shared=shared, **again))
    found: list[list[int]] = [[] for _ in streams]
    live = list(range(3))
    while live:
        number = rng.choice(live)
        response = next(streams[number], None)
        if response is not None:
            found[number].append(response.token)
        if response is None or (number == 1 and len(found[number]) == 6):
            streams[number].close()
            live.remove(number)
        if number == 2 and len(found[number]) == 5:
            streams[number].cancel()
        coming = max([*live, *(n for n, one in enumerate(found) if one)]) + 1
        if coming < len(streams) and rng.random() < 0.2 + 0.8 * (not live):
            live.append(coming)
    for number, (tokens, own) in enumerate(zip(found, expected, strict=True)):
        is_cut = number in (1, 2)
        assert tokens == (own[: len(tokens)] if is_cut else own), number
        assert len(tokens) >= 5


def test_a_network_drafts_for_several_texts_as_for_each(engines, monkeypatch):
    """With the rows of all texts in its passes; those that cannot do it draft in turn."""
    drafted, _ = engines
    if not drafted.proposer.networks:
        return  # a lookup learns from one run for the next
    prompts, num_joint = [*PROMPTS, "It was"], 0

    def trees(are_joint: bool, options: dict[str, Any]) -> list[Any]:
        found: list[Any] = []

        def record(group: Group, plan: Any, noises: Sequence[Any]) -> list[TokenTree | None]:
            nonlocal num_joint
            first = group[0][0]
            is_joint = isinstance(first, NetworkDrafting) and first.is_joint
            num_joint += are_joint and is_joint and len(group) > 1
            if are_joint:
                chosen = propose_all(group, plan, noises)
            else:
                pairs = zip(group, noises, strict=True)
                chosen = [one.propose(flight, plan, noise) for (one, flight), noise in pairs]
            found.extend(chosen)
            return chosen

        with monkeypatch.context() as patch:
            patch.setattr("mlx_redrafter.decoding.step.propose_all", record)
            list(drafted.stream_batch(prompts, max_tokens=9, **options))
        return found

    for options in (SHAPES[1], {**SHAPES[2], "temp": 0.8, "seed": 3}):
        together, alone = (trees(are_joint, options) for are_joint in (True, False))
        assert len(together) == len(alone)
        for one, other in zip(together, alone, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.read()[1:] == other.read()[1:]
                assert one.read().scores == pytest.approx(other.read().scores, abs=1e-3)
    drafts_alone = isinstance(drafted.proposer, DraftModel)
    assert (num_joint > 0) == (not drafts_alone)


def test_passes_are_dispatched_before_the_host_reads(engines, monkeypatch):
    """With a fixed plan the host reads once per step; where it waits by design, also before it."""
    drafted, plain = engines
    compile_passes(monkeypatch, uses=1)
    ahead = Engine(drafted.target.model, drafted.tokenizer, drafted.proposer)
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        """Count the calls of a function, but for those that return False."""
        function = getattr(owner, name)

        def counted(*args: Any) -> Any:
            result = function(*args)
            counts[name] += result is not False
            return result

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((SequenceDecoder, "push"), (Lane, "follow"), (device_read, "waiting")):
        count(owner, name)
    samplings: tuple[dict[str, Any], ...] = {"temp": 1.0, "seed": 2}, {"temp": 0.8, "seed": 3}, {}
    for shape, sampling in zip(SHAPES, samplings, strict=True):
        options: dict[str, Any] = {"max_tokens": 12, **shape, **sampling}
        expected = [r.token for r in plain.stream(PROMPTS[0], **options)]
        counts.clear()
        assert [r.token for r in ahead.stream(PROMPTS[0], **options)] == expected
        is_chain_of_model = isinstance(ahead.proposer, DraftModel) and shape == SHAPES[1]
        if shape and ahead.proposer.networks and not is_chain_of_model:
            assert counts["follow"] >= counts["push"] - 3
            assert counts["waiting"] <= counts["push"] + 3
        shared = ahead.share()
        first, second = (ahead.stream(PROMPTS[0], shared=shared, **options) for _ in range(2))
        begun = [next(first).token for _ in range(6)]  # alone, before the other one joins it
        assert [r.token for r in second] == expected
        assert [*begun, *(r.token for r in first)] == expected


def test_the_server(engines):
    drafted, plain = engines
    expected = plain.generate(PROMPTS[0], max_tokens=12, temp=0.8, seed=4)
    with serving(drafted) as served:
        found = served.text(prompt=PROMPTS[0], max_tokens=12, temperature=0.8, seed=4)
    assert found == expected


def test_check_and_compare(target, drafter, tmp_path, cli, monkeypatch):
    # Times of tiny models are of no use, and take most of the time.
    monkeypatch.setattr("mlx_redrafter.bench.speed.time_shapes", lambda *_: None)
    pair = ("--model", target, "--drafter", drafter, "--temp", 0.8, "-m", 6)
    result = cli("check", *pair, "-p", PROMPTS[0], "-p", PROMPTS[1])
    is_block = find_kind(drafter) is block
    assert (result.code, result.out.count("equal: 6 tokens")) == (0, 2)
    assert ("decoding 4 texts" in result.err) == (result.err != "") == is_block
    assert ("first drafts accepted by reading of the config" in result.out) == is_block
    (tmp_path / "prompts.txt").write_text("abc abc\n")
    out = tmp_path / "compare.json"
    options = ("--prompts", tmp_path / "prompts.txt", "--shapes", "1x3", "--repeats", 1, "-o", out)
    cli("bench", "compare", *pair, *options).done()
    rows = json.loads(out.read_text())["rows"]
    assert {row["num_different"] for row in rows if "auto" in row["arm"]} == {0}


def test_a_new_kind_needs_a_folder_and_an_entry(tmp_path, cli):
    """To be inspected; the tests above have the rest."""
    folder = write_heads(tmp_path / "toy", make_toy)
    inspected = cli("convert", folder).done()
    assert f"{toy.NAME}, which `load` reads as it is" in " ".join(inspected.out.split())
    refused = cli("convert", folder, tmp_path / "out")
    assert refused.code != 0
    assert toy.NAME in refused.err


def test_a_new_kind_checks_sizes_before_weights(target, tmp_path):
    save_drafter(toy.Toy(toy.ToyConfig(VOCAB_SIZE, 48)), tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size 48 does not match the target's 32"):
        load(target, drafter=tmp_path)

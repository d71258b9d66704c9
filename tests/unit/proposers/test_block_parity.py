"""Block drafters as published against numbers that the packages of their authors computed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.network import BlockDrafting, BlockNetwork, read_blocks
from mlx_redrafter.target.target import Target
from tests.golden.block_layouts import (
    CHAIN,
    LAYOUTS,
    LENGTHS,
    NUM_TARGET_LAYERS,
    ROOT,
    VOCAB,
    Layout,
    states,
    target_tables,
    tensors,
)
from tests.golden.record_block import FILE, REFERENCES
from tests.helpers.flights import flight_of
from tests.helpers.models import tiny_llama, wrapped_tokenizer

TOLERANCE = 1e-4
JUNK = 50.0


@pytest.fixture(scope="module")
def target() -> Target:
    """Make a model with the embedding and the head that the references had."""
    model: Any = tiny_llama(vocab_size=VOCAB, layers=NUM_TARGET_LAYERS)
    embedding, head = map(mx.array, target_tables())
    model.model.embed_tokens.weight, model.lm_head.weight = embedding, head
    return Target(model)


@pytest.fixture(scope="module")
def stored() -> dict[str, mx.array]:
    with np.load(FILE) as found:
        return {key: mx.array(found[key]) for key in found}


def write(layout: Layout, folder: Path) -> Path:
    arrays = {name: mx.array(one) for name, one in tensors(layout).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(layout.config))
    return folder


def history(drafting: BlockDrafting, length: int, rng: random.Random) -> Iterator[Pass]:
    """Bring a sequence to so many verified tokens in different steps; yield the last pass.

    Passes without drafts, accepted paths, and rejected drafts with states that no block may see.
    """
    verified = mx.array(states(length))
    prompt = max(1, length // 2)
    for start in range(0, prompt - 1, 4):
        drafting.read(verified[start : min(start + 4, prompt - 1)])
    done = prompt - 1
    while done < length:
        num_tokens = rng.randrange(1, min(4, length - done) + 1)
        num_rejected = rng.randrange(3) if num_tokens > 1 or rng.random() < 0.5 else 0
        path = [ROOT] * (num_tokens + num_rejected)
        junk = JUNK * mx.ones((num_rejected, verified.shape[1]))
        nodes = mx.concatenate([verified[done : done + num_tokens], junk])
        flight = flight_of(path, num_tokens - 1, ROOT, done, nodes)
        done += num_tokens
        if done == length:
            yield flight
        elif rng.random() < 0.4:
            drafting.skip(flight)
        else:
            drafting.propose(flight, DraftPlan.of(2, 4, 6), None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_references(
    tmp_path: Path, name: str, target: Target, stored: dict[str, mx.array]
) -> None:
    layout = LAYOUTS[name]
    folder = write(layout, tmp_path)
    assert recognise(folder)[0].NAME == "block drafter"
    network = load_block(folder)
    network.check_fit(target, wrapped_tokenizer(VOCAB))
    levels = network.config.num_drafts
    for length in LENGTHS:
        expected = {
            part: stored[f"{name}/{length}/{part}"]
            for part in ("unary", "linked", "confidence")
            if f"{name}/{length}/{part}" in stored
        }
        for seed in range(2):
            drafting = network.open(target, [ROOT] * max(1, length // 2), True, [])
            (flight,) = history(drafting, length, random.Random(seed))
            drafting.propose(flight, DraftPlan.of(1, 2, 2), None)
            drafting._flight = None
            found, outputs = read_again(drafting, flight, levels)
            assert_equal(found, expected["unary"], name)
        assert_linked(network, outputs, found, expected, name)


def read_again(drafting: BlockDrafting, flight: Pass, levels: int) -> tuple[mx.array, mx.array]:
    """Read the block after a pass once more, over the entries of the block before."""
    network = drafting.network
    outputs = read_blocks([drafting], [flight], levels)[0]
    return network.logits(outputs, drafting.target), outputs


def assert_equal(found: mx.array, expected: mx.array, name: str) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=TOLERANCE, err_msg=name)


def assert_linked(
    network: BlockNetwork,
    outputs: mx.array,
    unary: mx.array,
    expected: dict[str, mx.array],
    name: str,
) -> None:
    """Compare every link's children along the chain, and the confidences there."""
    link, state = network.link, None
    if link is None:
        assert set(expected) == {"unary"}
        return
    previous, is_path = mx.array([ROOT]), expected["linked"].ndim == 1
    count = network.config.num_candidates
    for depth in range(outputs.shape[0]):
        row = slice(depth, depth + 1)
        feature, state = link.feature(previous, outputs[row], state)
        scores = link.scores(feature, None)[0]
        if count is not None:
            rows = mx.argsort(-unary[depth])[:count]
            assert_equal(link.scores(feature, rows[None])[0], scores[rows], name)
            scores = mx.where(mx.any(mx.arange(VOCAB) == rows[:, None], axis=0), scores, 0)
        linked = unary[depth] + scores
        if is_path:  # the reference's own greedy choice among its candidates
            linked = mx.where(scores != 0, linked, -mx.inf)
            previous = mx.argmax(linked, keepdims=True)
            assert previous.item() == expected["linked"][depth].item()
            continue
        assert_equal(linked, expected["linked"][depth], name)
        if "confidence" in expected:
            found = network.confidences(outputs[row], previous)[0, 0]
            assert_equal(mx.exp(found), mx.sigmoid(expected["confidence"][depth]), name)
        previous = mx.array([CHAIN[depth]])


@pytest.mark.parametrize("name", REFERENCES)
def test_the_stored_numbers_are_those_of_the_packages(
    name: str, stored: dict[str, mx.array]
) -> None:
    pytest.importorskip(name.replace("-", "_"), reason=f"{name} is not installed")
    for key, layout in LAYOUTS.items():
        if name not in layout.references:
            continue
        for length, found in zip(LENGTHS, REFERENCES[name](layout), strict=True):
            for part, values in found._asdict().items():
                if values.size:
                    expected = np.array(stored[f"{key}/{length}/{part}"])
                    np.testing.assert_allclose(values, expected, atol=TOLERANCE, err_msg=key)

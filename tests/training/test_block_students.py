"""Block drafters while they learn: as in decoding, calibrated, and continued."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.along_text import read_blocks
from mlx_redrafter.proposers.block.surroundings import DecodingSurroundings, Surrounding
from mlx_redrafter.proposers.fit import Prediction, fit_depths
from mlx_redrafter.training import NetworkOptions, TrainingRequest, train_drafter
from tests.helpers.block import block_config, random_block
from tests.training.conftest import check_drafts, curve_of, small_request
from tests.training.pieces import Silent

VOCAB = 12
PLAIN = {
    "block_size": 4, "captured_layers": (1, 2), "windows": (None, None), "causal": (False, False)
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"windows": (4, None), "causal": (True, False)},
    "windows from the root": {"windows": (4, None), "windows_from_root": True},
    "sinks": {"has_sinks": True, "is_gated": True},
    "gemma4": {"layer_type": "gemma4", "has_values": False},
    "convolutions": {"conv_taps": 2, "conv_groups": 4, "first_slot": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_along_a_text_are_those_of_decoding(target, layout):
    network = random_block(block_config(VOCAB, 32, **{**PLAIN, **LAYOUTS[layout]}))
    rng = np.random.default_rng(0)
    states = mx.array(rng.normal(size=(9, 64)).astype(np.float32))
    roots = mx.array(rng.integers(0, VOCAB, 9).astype(np.int32))
    levels = network.config.num_drafts
    sequences, anchors = mx.array([1] * 4 + [2] * 5), [0, 1, 3, 5, 8]
    some = mx.array(anchors, dtype=mx.int32)
    found = read_blocks(network, target, roots[some], states, sequences, some, levels)
    masks = [network.config.mask_token_id] * (network.block_size(levels) - 1)
    slot = network.config.first_slot
    for number, position in enumerate(anchors):
        start = 0 if position < 4 else 4
        caches, fused = (
            [KVCache() for _ in network.layers],
            network.fuse(states[start : position + 1]),
        )
        part = Surrounding(caches, fused, 0, 0, mx.array([position - start]))
        around = DecodingSurroundings([part], 1 + len(masks))
        block = network.embed(mx.array([roots[position].item(), *masks]), target)[None]
        expected = network.outputs(block, around)[0, slot : slot + levels]
        both = np.array(found[number]), np.array(expected)
        np.testing.assert_allclose(*both, rtol=1e-5, atol=2e-5)  # without AVX-512: 9e-6


def test_calibration_finds_the_factor_of_each_depth():
    """Of tokens that are drawn with probabilities sharper, or flatter, than those of a network."""
    factors, count = (0.5, 1.0, 2.0, 4.0), 1500
    log_probs = mx.zeros((count, 1))
    depths = []
    for depth, factor in enumerate(factors):
        logits = mx.random.normal((count, VOCAB), key=mx.random.key(depth))
        drawn = mx.random.categorical(factor * logits, key=mx.random.key(9 + depth))
        depths.append(Prediction(logits, drawn[:, None].astype(mx.int32), log_probs))
    calibration, scales = fit_depths(random_block(block_config(VOCAB, 32)), [depths])
    assert scales == pytest.approx(factors, rel=0.2)
    assert min(scales) < calibration.inverse_temperature < max(scales)


@pytest.fixture(scope="module")
def earlier(stories_file: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRequest:
    """Train a DSpark drafter of five drafts for some seconds."""
    folder = tmp_path_factory.mktemp("blocks")
    request = small_request(stories_file, folder / "earlier")
    network = NetworkOptions("dspark", length=6)
    data = replace(request.data_options, tokens=4000, answer_tokens=48, held_out=6)
    training = replace(request.training, epochs=9, num_evaluations=1)
    request = replace(
        request, network=network, cache=folder / "cache", data_options=data, training=training
    )
    assert train_drafter(request, Silent()) is not None
    return request


def test_a_drafter_is_calibrated_and_its_trees_pay(earlier, cli):
    config = load_block(earlier.out).config
    assert config.has_confidence
    assert len(set(config.depth_scales)) > 1
    options = ("-m", 80, "--beam-length", 6, "--beam-width")
    wide, chain = (
        check_drafts(cli, Path(earlier.model), earlier.out, "Once", *options, *shape)
        for shape in ((4, "--tree-nodes", 16), (1, "--tree-nodes", 6))
    )
    assert wide["tokens_per_step"] >= chain["tokens_per_step"] > 1.2


def test_an_earlier_drafter_is_trained_further(earlier, tmp_path):
    start = replace(earlier, out=tmp_path / "more")
    network = NetworkOptions(start_from=str(earlier.out))
    for head in ("dflash", "redrafter"):
        with pytest.raises(ConfigError, match=f"for --head {head}, found one for --head dspark"):
            train_drafter(replace(start, network=replace(network, head=head)), Silent())
    training = replace(earlier.training, epochs=1)
    more = replace(start, network=replace(network, head="dspark"), training=training)
    result = train_drafter(more, Silent())
    # The length is the earlier drafter's, and so is what it knows.
    assert result.measured.steps
    assert curve_of(more.out)[0] > 1.2

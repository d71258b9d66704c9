"""Converted drafters with a trained target: the self-test, and the text that comes out.

A drafter and Medusa heads are fitted to texts of stories260k, so they are accepted there. Medusa
heads are also read from files.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter import Engine, generate, load, load_drafter, stream_generate
from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.convert import selftest
from mlx_redrafter.convert.conversion import Conversion
from mlx_redrafter.convert.recognition import inspect_checkpoint
from mlx_redrafter.convert.selftest import MIN_ACCEPTANCE, TOKENS_PER_PROMPT
from mlx_redrafter.convert.selftest import PROMPTS as PROMPTS_OF_SELF_TEST
from mlx_redrafter.convert.vocabulary import count_tokens
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.medusa import load as load_medusa
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target
from tests.conftest import Trained
from tests.convert import handmade
from tests.convert.fitted import fit_drafter, fit_medusa
from tests.convert.handmade import convert, refusal
from tests.helpers.equality import batch_tokens
from tests.helpers.medusa import random_medusa
from tests.helpers.models import change_config, expand, random_drafter, shared_path

PROMPTS = ("Once upon a time", "The big dog", "Lily wanted to go to the park")
Convert = Callable[..., Conversion]


@pytest.fixture(scope="module")
def stories(stories: Trained) -> Iterator[Trained]:
    """Let the model write the texts of the self-test once: two seconds less per conversion."""
    texts = selftest.decode_all(Target(stories.model), stories.tokenizer, (FINAL,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "decode_all", lambda *_: texts)
        yield stories


@pytest.fixture(scope="module")
def fitted(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted drafter in the layout of Apple's code."""
    folder = tmp_path_factory.mktemp("fitted")
    fit_drafter(Target(stories.model), selftest.decode_all(), folder)
    return folder / "apple"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of stories, whose tokens are counted."""
    path = tmp_path / "text.txt"
    stories = shared_path("text/tinystories-train.txt").read_text(encoding="utf-8")
    path.write_text(stories[:20_000], encoding="utf-8")
    return path


@pytest.fixture
def convert_fitted(fitted: Path, stories: Trained, tmp_path: Path) -> Convert:
    """Convert the fitted drafter for stories260k with any options."""
    return partial(convert, fitted, tmp_path / "out", target=stories.folder)


def decode(stories: Trained, drafter: Drafter | None) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    engine = Engine(stories.model, stories.tokenizer, drafter)
    return batch_tokens(engine.stream_batch(PROMPTS, max_tokens=40), len(PROMPTS))


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {}, {"dtype": "float32", "quantize": True, "q_bits": 8},
        {"dtype": "float32", "quantize": True}],
)  # fmt: skip
def test_fitting_drafters_are_calibrated_and_keep_texts(convert_fitted, stories, tmp_path, options):
    conversion = convert_fitted(**options)
    drafter = load_drafter(tmp_path / "out")
    assert conversion.warnings == ()
    assert conversion.provenance["self_test"]["acceptance"] > MIN_ACCEPTANCE
    assert conversion.provenance["target"] == "stories260k"
    assert drafter.config == conversion.config
    assert conversion.config.inverse_temperature != 1
    assert decode(stories, drafter) == decode(stories, None)


def test_the_recurrence_is_the_one_that_the_target_accepts_most(
    convert_fitted, fitted, stories, tmp_path
):
    wrong = shutil.copytree(fitted, tmp_path / "wrong")
    change_config(wrong, rnn_activation="identity")
    conversion = convert(wrong, tmp_path / "right", target=stories.folder)
    assert conversion.config.rnn_activation == "silu"
    assert conversion.provenance["notes"][-1].endswith("; used other recurrence")
    assert conversion.warnings == ()
    assert convert_fitted().provenance["notes"][-1].endswith("; used as it says")
    assert convert_fitted(rnn_activation="identity").config.rnn_activation == "identity"


@pytest.mark.parametrize("make", [
    lambda: random_drafter(512, 64), lambda: random_drafter(512, 64, rnn=False),
    lambda: random_medusa(512, 64),
], ids=["recurrent", "sum", "medusa"])  # fmt: skip
def test_an_untrained_drafter_is_noticed(stories, tmp_path, make):
    save_drafter(make(), tmp_path / "source")
    (warning,) = convert(tmp_path / "source", tmp_path / "out", target=stories.folder).warnings
    assert "probably trained for another model" in warning


@pytest.mark.parametrize("is_linear", [False, True])
def test_the_self_test_measures_what_drafting_does(convert_fitted, stories, tmp_path, is_linear):
    """The first draft of a beam search at every token of the target's own text."""
    activation = "identity" if is_linear else "silu"
    conversion = convert_fitted(dtype="float32", rnn_activation=activation)
    drafter = load_drafter(tmp_path / "out")
    target, shape = Target(stories.model), DraftShape(1, 2)
    matches = []
    for prompt in PROMPTS_OF_SELF_TEST:
        cache = target.caches.new()
        ids = mx.array(stories.tokenizer.encode(prompt), dtype=mx.int32)
        forward = prefill(target, ids, cache, 512)
        for _ in range(TOKENS_PER_PROMPT):
            root = mx.argmax(forward.logits, axis=-1)
            hidden = forward.hidden_states[0]
            draft = expand(drafter, target.modules.embed, hidden, root, shape).tokens[0]
            forward = target.advance(root, cache)
            matches.append(draft.item() == mx.argmax(forward.logits).item())
    measured = conversion.provenance["self_test"]
    assert measured["positions"] == len(matches)
    assert measured["acceptance"] == pytest.approx(sum(matches) / len(matches))


@pytest.mark.parametrize(
    ("hidden", "rows", "message"),
    [
        (32, 512, "hidden_size 32 does not match"),
        (64, 400, "vocab_size 400 does not match"),
        (64, 700, "vocab_size 700 does not match"),
    ],
)
def test_a_drafter_of_another_model(stories, tmp_path, hidden, rows, message):
    sizes = {"hidden_size": hidden, "exit_dim": 2 * hidden, "vocab_size": rows}
    config = {**handmade.CONFIG, **sizes}
    source = handmade.write(tmp_path / "source", handmade.tensors(config), config)
    assert message in refusal(source, target=stories.folder)
    values = handmade.medusa(3, hidden, rows)
    assert message in refusal(write_heads(tmp_path / "heads", values, {}), target=stories.folder)
    if rows >= 512:  # before any weights are read; fewer rows may be padding, which is seen later
        values["0.1.weight"][0] = float("nan")
        with pytest.raises(CheckpointError, match=message):
            load(stories.folder, drafter=write_heads(tmp_path / "heads", values, {}))


def test_padding_rows_are_dropped(stories, tmp_path):
    config = {**handmade.CONFIG, "hidden_size": 64, "exit_dim": 128, "vocab_size": 576}
    values = handmade.tensors(config)
    source = handmade.write(tmp_path / "source", values, config, "pytorch_model.bin")
    options: Any = {"target": stories.folder, "dtype": "float32"}
    conversion = convert(source, tmp_path / "out", **options)
    assert conversion.config.vocab_size == 512
    assert any("64 padding rows" in note for note in conversion.provenance["notes"])
    head = load_drafter(tmp_path / "out").lm_head[-1].weight
    kept = mx.array(values["lm_head.2.weight"][:512])
    assert mx.array_equal(head, kept).item()


def test_a_byte_order_mark_is_not_counted(stories, tmp_path):
    counts = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "text.txt").write_text("Once upon a time", encoding=encoding)
        counts.append(count_tokens(stories.tokenizer, [tmp_path / "text.txt"], 512).tolist())
    assert counts[0] == counts[1]


def test_vocabulary_slices_are_exact(convert_fitted, stories, text, tmp_path):
    whole = convert_fitted(dtype="float32").provenance["self_test"]["acceptance"]
    conversion = convert_fitted(dtype="float32", vocab_slice=300, vocab_text=[text])
    values = read_config(tmp_path / "out")
    assert values["draft_vocab_size"] == 300
    drafter = load_drafter(tmp_path / "out")
    kept = set(drafter.token_ids.tolist())
    assert {0, 1, 2} <= kept  # special tokens, never in the text
    assert len(kept) == 300
    assert conversion.provenance["self_test"]["acceptance"] > whole - 0.1
    assert decode(stories, drafter) == decode(stories, None)


# Medusa heads


@pytest.fixture(scope="module")
def source(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted heads in the layout of FasterDecoding's code."""
    folder = tmp_path_factory.mktemp("fitted") / "medusa"
    fit_medusa(Target(stories.model), selftest.decode_all(), folder)
    return folder


@pytest.mark.parametrize("tree", ["dynamic", "static"])
def test_converted_heads_give_the_targets_text(source, stories, text, tmp_path, tree):
    options: dict[str, Any] = {"dtype": "float32", "tree": tree}
    if tree == "dynamic":
        options |= {"quantize": True, "vocab_slice": 256, "vocab_text": [text]}
    conversion = convert(source, tmp_path / "out", target=stories.folder, **options)
    measured = conversion.provenance["self_test"]
    assert measured["acceptance"] > MIN_ACCEPTANCE
    assert conversion.warnings == ()
    config = read_config(tmp_path / "out")
    assert config["model_type"] == "redrafter_medusa"
    assert config["score_scale"] != 1
    accuracies = config["rank_accuracies"]
    assert accuracies[0][0] == pytest.approx(measured["acceptance"], abs=0.06)
    assert accuracies[0][0] > accuracies[1][0] > accuracies[1][5]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "[Medusa](https://arxiv.org/abs/2401.10774) heads for `stories260k`" in card

    if tree == "static":  # a conversion can be converted again, and knows what was measured
        again = convert(tmp_path / "out", tmp_path / "again", dtype="float32")
        assert again.config == conversion.config
    model, tokenizer, heads = load(stories.folder, drafter=tmp_path / "out")
    assert isinstance(heads, Medusa)
    assert heads.config.tree == tree
    plain = generate(model, tokenizer, PROMPTS[-1], drafter=None, max_tokens=60)
    for shape in ({}, {"beam_width": 1, "beam_length": 3}, {"beam_length": 3, "tree_nodes": 9}):
        options = {"drafter": heads, "max_tokens": 60, **shape}
        responses = list(stream_generate(model, tokenizer, PROMPTS[-1], **options))
        assert "".join(response.text for response in responses) == plain
        if shape:
            assert responses[-1].tokens_per_step > 1.2


def test_published_heads_by_command(source, stories, tmp_path, cli):
    """As they are, and converted; `check` compares every kind in test_every_kind."""
    pair = ["--model", stories.folder, "--drafter", source]
    assert cli("check", *pair, "-p", PROMPTS[-1], "-m", 9).out.startswith("equal: 9 tokens")
    options = ["--target", stories.folder, "--tree", "static"]
    found = cli("convert", source, tmp_path / "out", *options)
    assert "2 heads of 512 tokens with 1 blocks, static tree, float16" in found.out


Values = dict[str, np.ndarray]
CONFIG = {"medusa_num_heads": 2, "hidden_size": 8, "base_model_name_or_path": "org/vicuna"}


def write_heads(folder: Path, values: Values, config: dict[str, Any] = CONFIG) -> Path:
    return handmade.write(folder, values, config, "medusa_lm_head.safetensors")


def without(*names: str) -> Values:
    return {name: value for name, value in handmade.medusa(3).items() if name not in names}


def with_(name: str, shape: tuple[int, ...]) -> Values:
    return {**handmade.medusa(3), name: np.zeros(shape, np.float32)}


BAD: dict[str, tuple[Values, dict[str, Any], str]] = {
    "missing": (without("1.0.linear.bias"), CONFIG, r"1\.0\.linear\.bias is missing, expected sh"),
    "no final layer": (without("0.1.weight"), CONFIG, "the final layer of the first head.*none"),
    "shape": (with_("2.0.linear.weight", (8, 9)), CONFIG,
        r"2\.0\.linear\.weight' has shape \[8, 9\], expected \[8, 8\]"),
    "rows": (with_("1.1.weight", (71, 8)), CONFIG, r"1\.1\.weight' has shape \[71, 8\], expected"),
    "unexpected": (with_("norm.weight", (8, )), CONFIG, "not part of Medusa heads: 'norm.weight'"),
    "twice": (with_("medusa_head.0.1.weight", (70, 8)), CONFIG, "both stand for heads.0.1.weight"),
    "whole model": (with_("model.embed_tokens.weight", (70, 8)), {**CONFIG, "model_type": "llama"},
        "in a Medusa-2 model both were trained"),
    "too few": (handmade.medusa(2), {**CONFIG, "medusa_num_heads": 5}, "medusa_num_heads 5, but"),
    "hidden": (handmade.medusa(2), {**CONFIG, "hidden_size": 16}, "hidden_size 16, but the tens"),
    "layers": (handmade.medusa(2), {**CONFIG, "medusa_num_layers": 2}, "num_layers 2, but the te"),
    "vllm's layers": (handmade.medusa(2), {"model_type": "medusa", "num_hidden_layers": 2},
        "num_hidden_layers 2, but the te"),
    "vocabulary": (handmade.medusa(2), {**CONFIG, "vocab_size": 90}, "vocab_size 90, but"),
    "too many heads": (handmade.medusa(65, 1, 1), {"medusa_num_heads": 2}, "num_heads must be an"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(tmp_path, case):
    values, config, message = BAD[case]
    source = write_heads(tmp_path / "source", values, config)
    assert recognise(source)[0].NAME == "Medusa heads"
    with pytest.raises(CheckpointError, match=message):
        load_medusa(source)
    assert re.search(message, refusal(source))
    (note,) = inspect_checkpoint(source).notes
    assert note.isprintable()


def test_inspection_names_the_target(tmp_path):
    found = inspect_checkpoint(write_heads(tmp_path, handmade.medusa(5)))
    assert found.kind == "Medusa heads with fasterdecoding names, for 'org/vicuna'"
    assert found.notes == ("config.json says medusa_num_heads 2, the file has 5 heads",)
    assert found.config.to_dict()["num_heads"] == 5


def test_pickles_are_for_convert(tmp_path):
    handmade.write(tmp_path, handmade.medusa(2), CONFIG, "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="loadable by `redrafter-mlx convert`"):
        recognise(tmp_path)


@pytest.mark.parametrize(("values", "config", "options", "message"), [
    (handmade.medusa(2), CONFIG, {"rnn_activation": "silu"}, "activation is not for Medusa heads"),
    (handmade.medusa(2), CONFIG, {"tree": "static"}, "a static tree needs --target"),
    (handmade.tensors(), handmade.CONFIG, {"tree": "static"}, "--tree is not for"),
])  # fmt: skip
def test_options_that_do_not_fit(tmp_path, values, config, options, message):
    with pytest.raises(ConfigError, match=message):
        convert(handmade.write(tmp_path / "source", values, config), tmp_path / "out", **options)

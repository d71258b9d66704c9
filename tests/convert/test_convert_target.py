"""Converted drafters with a trained target: the self-test, and the text that comes out.

A drafter is fitted to stories260k within seconds, so acceptance is real, if modest.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import load_drafter
from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.convert.conversion import Conversion, convert_drafter
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.selftest import MIN_ACCEPTANCE, TOKENS_PER_PROMPT
from mlx_redrafter.convert.selftest import PROMPTS as PROMPTS_OF_SELF_TEST
from mlx_redrafter.convert.vocabulary import count_tokens
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from tests.conftest import Trained
from tests.convert import handmade
from tests.convert.fitted import fit_drafter
from tests.helpers.equality import tokens
from tests.helpers.models import random_drafter, shared_path
from tests.helpers.recurrent_search import expand

pytestmark = pytest.mark.usefixtures("texts_are_kept")
TEXT = "text/tinystories-train.txt"
PROMPTS = ("Once upon a time", "The big dog", "Lily wanted to go to the park")
Convert = Callable[..., Conversion]


@pytest.fixture(scope="module")
def fitted(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted drafter in the layout of Apple's code."""
    folder = tmp_path_factory.mktemp("fitted")
    fit_drafter(stories.model, stories.tokenizer, shared_path(TEXT), folder)
    return folder / "apple"


@pytest.fixture
def convert(fitted: Path, stories: Trained, tmp_path: Path) -> Convert:
    """Convert the fitted drafter for stories260k with any options."""

    def run(**options: Any) -> Conversion:
        return convert_drafter(
            fitted, tmp_path / "out", ConversionOptions(target=stories.folder, **options)
        )

    return run


def decode(stories: Trained, drafter: Drafter | None) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    options: Any = {"tokenizer": stories.tokenizer, "max_tokens": 40}
    return [tokens(stories.model, prompt, drafter, **options) for prompt in PROMPTS]


def test_quantised_drafters_give_the_same_text(
    convert: Convert, stories: Trained, tmp_path: Path
) -> None:
    plain = decode(stories, None)
    formats: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "float32", "quantize": True, "q_bits": 8},
        {"dtype": "float32", "quantize": True},
    ]
    for options in formats:
        assert convert(**options).provenance["self_test"]["acceptance"] > MIN_ACCEPTANCE
        assert decode(stories, load_drafter(tmp_path / "out")) == plain


def test_a_drafter_that_fits_is_calibrated_and_gets_no_warning(
    convert: Convert, tmp_path: Path
) -> None:
    conversion = convert()
    assert conversion.warnings == ()
    assert conversion.provenance["self_test"]["acceptance"] > MIN_ACCEPTANCE
    assert conversion.provenance["target"] == "stories260k"
    assert load_drafter(tmp_path / "out").config == conversion.config
    assert conversion.config.inverse_temperature != 1


def test_the_recurrence_is_the_one_that_the_target_accepts_most(
    convert: Convert, fitted: Path, stories: Trained, tmp_path: Path
) -> None:
    wrong = shutil.copytree(fitted, tmp_path / "wrong")
    values = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**values, "rnn_activation": "identity"}))
    options = ConversionOptions(target=stories.folder)
    conversion = convert_drafter(wrong, tmp_path / "right", options)
    assert conversion.config.rnn_activation == "silu"
    assert conversion.provenance["notes"][-1].endswith("; used other recurrence")
    assert conversion.warnings == ()
    assert convert().provenance["notes"][-1].endswith("; used as it says")
    assert convert(rnn_activation="identity").config.rnn_activation == "identity"


@pytest.mark.parametrize("rnn", [True, False])
def test_an_untrained_drafter_is_noticed(stories: Trained, tmp_path: Path, rnn: bool) -> None:
    save_drafter(random_drafter(512, 64, rnn=rnn), tmp_path / "source")
    options = ConversionOptions(target=stories.folder)
    conversion = convert_drafter(tmp_path / "source", tmp_path / "out", options)
    assert "probably trained for another model" in conversion.warnings[0]


@pytest.mark.parametrize("is_linear", [False, True])
def test_the_self_test_measures_what_drafting_does(
    convert: Convert, stories: Trained, tmp_path: Path, is_linear: bool
) -> None:
    """The first draft of a beam search at every token of the target's own text."""
    activation = "identity" if is_linear else "silu"
    conversion = convert(dtype="float32", rnn_activation=activation)
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
    ("config", "message"),
    [
        ({"hidden_size": 32, "exit_dim": 64, "vocab_size": 512}, "hidden_size 32 does not match"),
        ({"hidden_size": 64, "exit_dim": 128, "vocab_size": 400}, "vocab_size 400 does not match"),
        ({"hidden_size": 64, "exit_dim": 128, "vocab_size": 700}, "vocab_size 700 does not match"),
    ],
)
def test_a_drafter_of_another_model(
    stories: Trained, tmp_path: Path, config: dict[str, int], message: str
) -> None:
    handmade.write_checkpoint(tmp_path / "source", "zip", {**handmade.CONFIG, **config})
    assert message in handmade.refusal(tmp_path / "source", target=stories.folder)


def test_padding_rows_are_dropped(stories: Trained, tmp_path: Path) -> None:
    config = {**handmade.CONFIG, "hidden_size": 64, "exit_dim": 128, "vocab_size": 576}
    handmade.write_checkpoint(tmp_path / "source", "zip", config)
    options = ConversionOptions(target=stories.folder, dtype="float32")
    conversion = convert_drafter(tmp_path / "source", tmp_path / "out", options)
    assert conversion.config.vocab_size == 512
    assert any("64 padding rows" in note for note in conversion.provenance["notes"])
    head = load_drafter(tmp_path / "out").lm_head[-1].weight
    kept = mx.array(handmade.tensors(config)["lm_head.2.weight"][:512])
    assert mx.array_equal(head, kept).item()


def test_a_byte_order_mark_is_not_counted(stories: Trained, tmp_path: Path) -> None:
    counts = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "text.txt").write_text("Once upon a time", encoding=encoding)
        counts.append(count_tokens(stories.tokenizer, [tmp_path / "text.txt"], 512).tolist())
    assert counts[0] == counts[1]


def test_a_vocabulary_slice_drafts_less_and_changes_no_text(
    convert: Convert, stories: Trained, tmp_path: Path
) -> None:
    whole = convert(dtype="float32").provenance["self_test"]["acceptance"]
    conversion = convert(dtype="float32", vocab_slice=300, vocab_text=[shared_path(TEXT)])
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["draft_vocab_size"] == 300
    drafter = load_drafter(tmp_path / "out")
    kept = set(drafter.token_ids.tolist())
    assert {0, 1, 2} <= kept  # special tokens, never in the text
    assert len(kept) == 300
    assert conversion.provenance["self_test"]["acceptance"] > whole - 0.1
    assert decode(stories, drafter) == decode(stories, None)

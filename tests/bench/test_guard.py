"""Guarding against slowness: bad cases for drafts, and when a case is lost."""

import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter import load
from mlx_redrafter.bench.lab import cases
from mlx_redrafter.bench.lab.arms import run
from mlx_redrafter.bench.lab.cases import make_cases, ordinary_tokens, random_twin
from mlx_redrafter.bench.lab.guard import MIN_TOKENS, GuardCase, guard, judge
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
)
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from tests.bench.commands import run_lab
from tests.helpers.models import random_drafter

NAMES = ["random tokens", "another language", "source code", "random drafter"]
GREEDY = CommonSettings(None, None, None, max_tokens=40)


def make_run(arm, repeat, seconds, length=40, plain=0, first=1):
    tokens = [first, *range(1, length)]
    steps = [] if arm == STOCK else [length - 1]
    return TimedRun(
        "c", 0, arm, str(repeat), "c", repeat, 5, 1.0, seconds, tokens, steps, 80, 80, plain
    )


def make_pairs(*seconds, **values):
    """Stock mlx-lm takes one second, auto these."""
    return [
        one
        for i, auto in enumerate(seconds)
        for one in (make_run(STOCK, i, 1.0), make_run(AUTO, i, auto, plain=30, **values))
    ]


def test_the_median_pair_decides():
    found = judge("c", make_pairs(1.0, 1.02, 2.0), GREEDY, 3)
    assert found.holds
    assert found.decode.median == pytest.approx(1 / 1.02)
    assert found.worst == pytest.approx(0.5)
    assert found.total.median == pytest.approx(2 / 2.02)
    assert found.tokens_per_step == 1
    assert found.plain_share == pytest.approx(30 / 39)
    assert not judge("c", make_pairs(1.0, 1.04, 2.0), GREEDY, 3).holds


def test_another_text_or_too_few_pairs_lose():
    assert judge("c", make_pairs(1.0, first=2), GREEDY, 1).num_different == 1
    assert not judge("c", make_pairs(1.0, first=2), GREEDY, 1).holds
    found = judge("c", make_pairs(1.0), GREEDY, 2)
    assert (found.num_pairs, found.num_missing, found.holds) == (1, 1, False)


def test_short_answers_have_no_say_in_speed():
    short = [make_run(arm, 9, seconds, MIN_TOKENS - 1) for arm, seconds in ((STOCK, 1), (AUTO, 9))]
    found = judge("c", [*make_pairs(1.0), *short], GREEDY, 1)
    assert (found.num_pairs, found.num_short, found.worst) == (1, 1, 1)
    assert found.holds
    # Unless all are asked to be short.
    few = CommonSettings(None, None, None, max_tokens=MIN_TOKENS - 1)
    assert judge("c", short, few, 1).num_pairs == 1
    nothing = judge("c", short, GREEDY, 1)
    assert (nothing.decode, nothing.plain_share, nothing.holds) == (None, None, False)


def test_at_a_temperature_plain_decoding_has_the_right_text():
    setting = CommonSettings(None, None, None, max_tokens=40, temp=0.7)
    runs = make_pairs(1.0, first=2)
    assert judge("c", [*runs, make_run(PLAIN, 0, 1.0, first=2)], setting, 1).holds
    assert judge("c", [*runs, make_run(PLAIN, 0, 1.0)], setting, 1).num_different == 1


def test_random_tokens_are_no_special_ones():
    tokenizer = SimpleNamespace(
        eos_token_ids={1}, all_special_ids=[0], get_added_vocab=lambda: {"x": 4},
        get_vocab=lambda: {str(i): i for i in range(8)},
    )  # fmt: skip
    assert ordinary_tokens(tokenizer, 7) == [2, 3, 5, 6]
    with pytest.raises(ConfigError, match="not special"):
        ordinary_tokens(tokenizer, 2)


def test_cases(folders):
    _, tokenizer, drafter = load(*folders)
    made = make_cases(tokenizer, drafter, True, 3)
    again = make_cases(tokenizer, drafter, True, 3)
    assert [case.name for case in made] == NAMES
    for case, same in zip(made, again, strict=True):
        prompts = [case.prompt(number) for number in range(30)]
        assert len({tuple(prompt.ids) for prompt in prompts}) == 30
        assert len({prompt.name for prompt in prompts}) == 30
        assert prompts == [same.prompt(number) for number in range(30)]
        assert min(len(prompt.ids) for prompt in prompts) > 8
    assert len(made[0].prompt(0).ids) == 64
    assert made[0].prompt(0) != make_cases(tokenizer, drafter, True, 4)[0].prompt(0)
    assert [case.drafter is drafter for case in made] == [True, True, True, False]


def test_left_out_words_keep_the_lines():
    tokenizer = SimpleNamespace(has_chat_template=False, encode=lambda text: [text])
    texts = ("a b\n  c " + "d " * 9,)
    prompts = [cases._text_prompt(tokenizer, "x", texts, False, i).ids[0] for i in range(5)]
    assert prompts[1].startswith("b\n  c d")
    assert prompts[4] == prompts[0]  # a round later


@pytest.mark.parametrize("bits", [None, 4])
def test_a_random_twin_is_as_dear(bits):
    config = DrafterConfig(96, 64, exit_dim=128, num_draft_layers=2, rnn=True, draft_vocab_size=70)
    drafter = Drafter(config)
    drafter.set_dtype(mx.bfloat16)
    drafter.token_ids = mx.arange(70, dtype=mx.int32)[::-1]
    if bits is not None:
        quantize_drafter(drafter, bits, 64)
    twin = random_twin(drafter, 1)
    assert twin.config == drafter.config
    own, other = (dict(tree_flatten(one.parameters())) for one in (drafter, twin))
    assert {k: (v.shape, v.dtype) for k, v in own.items()} == {
        k: (v.shape, v.dtype) for k, v in other.items()
    }
    assert [type(m) for m in drafter.modules()] == [type(m) for m in twin.modules()]
    assert mx.array_equal(own["token_ids"], other["token_ids"])
    assert not mx.array_equal(own["rnn_w.weight"], other["rnn_w.weight"])
    assert mx.array_equal(twin.rnn_w.weight, random_twin(drafter, 1).rnn_w.weight)
    assert any(isinstance(m, nn.QuantizedLinear) for m in twin.modules()) == (bits is not None)


def test_plain_steps_are_counted(folders):
    model, tokenizer, drafter = load(*folders)
    setting = CommonSettings(model, tokenizer, drafter, 9)
    turn = Turn("g", 0, EncodedPrompt("p", "c", [5, 6]), 0)
    plain = run(PLAIN, plain_arm(setting), turn)
    assert plain.num_plain == plain.steps == len(plain.tokens) - 1
    # The last token of all is decoded plainly, where nothing is left to draft.
    drafted = run("w", drafted_arm(setting, DraftPlan.of(1, 3)), turn)
    assert drafted.num_plain <= 1 < drafted.steps


def test_prompts_with_short_answers_are_replaced(folders, tmp_path):
    model, tokenizer, drafter = load(*folders)
    setting = CommonSettings(model, tokenizer, drafter, 40)

    def prompt(number):
        return EncodedPrompt(str(number), "c", [7, 8, number + 3])

    texts = [run(PLAIN, plain_arm(setting), Turn("", 0, prompt(i), 0)).tokens for i in range(12)]
    assert {len(text) for text in texts} == {40}
    # An end that cuts the first answer, and of the others as few as possible.
    end = min(texts[0][:20], key=lambda token: sum(token in text for text in texts))
    expected = [i for i, text in enumerate(texts) if end not in text[: MIN_TOKENS - 1]]
    assert len(expected) >= 3
    tokenizer.eos_token_ids.add(end)
    made = [GuardCase("c", drafter, prompt)]
    recording = Recording(tmp_path / "g.json", "guard", {})
    (verdict,) = guard(setting, made, 3, recording)
    assert (verdict.num_pairs, verdict.num_different) == (3, 0)
    assert verdict.num_short == expected[2] + 1 - 3 > 0
    assert [one.arm for one in recording.runs][:4] == [STOCK, AUTO, AUTO, STOCK]
    again = Recording(tmp_path / "g.json", "guard", {}, resume=True)
    assert guard(setting, made, 3, again) == [verdict]
    assert len(again.runs) == len(recording.runs)


@pytest.mark.parametrize("temp", [0, 0.8])
def test_command(folders, tmp_path, temp):
    out = tmp_path / "guard.json"
    output = run_lab(
        "guard", "--model", folders[0], "--drafter", folders[1], "--pairs", 2,
        "--max-tokens", 12, "--temp", temp, "--out", out,
    )  # fmt: skip
    assert "texts differ" not in output
    assert "timing the draft shapes took" in output
    found = json.loads(out.read_text())
    assert [verdict["case"] for verdict in found["found"]] == NAMES
    assert {verdict["num_different"] for verdict in found["found"]} == {0}
    assert {verdict["num_pairs"] for verdict in found["found"]} <= {1, 2}
    arms = {STOCK, AUTO} | ({PLAIN} if temp else set())
    assert {one["arm"] for one in found["runs"]} == arms


def test_command_measures_only_the_cases_asked_for(folders, tmp_path):
    out = tmp_path / "guard.json"
    arguments = ["guard", "--model", folders[0], "--drafter", folders[1], "--pairs", 1,
                 "--max-tokens", 12, "--out", out, "--case"]  # fmt: skip
    run_lab(*arguments, NAMES[-1])
    found = json.loads(out.read_text())
    assert [verdict["case"] for verdict in found["found"]] == NAMES[-1:]
    assert {one["group"] for one in found["runs"]} == {NAMES[-1]}
    with pytest.raises(ConfigError, match=NAMES[-1]):
        make_cases(None, None, True, 0, ["magic"])


def test_a_twin_accepts_next_to_nothing(stories):
    twin = random_twin(random_drafter(512, 64), 0)
    setting = CommonSettings(stories.model, stories.tokenizer, twin, 40)
    turn = Turn("g", 0, EncodedPrompt("p", "c", stories.tokenizer.encode("Once upon a time")), 0)
    found = run(AUTO, drafted_arm(setting, DraftPlan.of(1, 4)), turn)
    assert len(found.tokens) - 1 < 1.5 * found.steps

"""Texts of two published models are stock mlx-lm's; `bench.lab exact` compares more of them."""

from typing import Any, cast

import mlx_lm
import pytest

from mlx_redrafter import load, stream_generate
from mlx_redrafter.bench.lab.exactness import decode_texts
from mlx_redrafter.bench.lab.real_models import GEMMA, SMOLLM2
from mlx_redrafter.bench.prompts import encode_prompts, fit_prompts, read_prompts, select_prompts
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from tests.helpers.drafts import Scripted
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, tokens
from tests.helpers.models import real_folder, shared_path
from tests.server.serving import serving

pytestmark = pytest.mark.timeout(900)  # a test may be the first to ask for a model
# Maximum number of tokens of a question.
SHORT = 60
TREE = {"beam_width": 4, "beam_length": 5, "tree_nodes": 9, "max_tokens": 16}


@pytest.fixture(scope="module")
def smollm2():
    return load(real_folder(SMOLLM2), drafter="lookup")[:2]


@pytest.fixture(scope="module")
def gemma():
    return load(real_folder(GEMMA), drafter="lookup")[:2]


def _questions(tokenizer: Any, count: int) -> list[EncodedPrompt]:
    """Short questions of Spec-Bench, from all categories alternately."""
    prompts = read_prompts(shared_path("prompts/spec_bench.jsonl"))
    short = [one for one in prompts if len(tokenizer.encode(one.text)) < SHORT]
    return encode_prompts(tokenizer, select_prompts(short, count))


def _long_prompt(tokenizer: Any, length: int) -> list[int]:
    """Encode a text of ``length`` tokens, made of questions."""
    prompts = read_prompts(shared_path("prompts/mt_bench.jsonl"))
    (prompt,) = encode_prompts(tokenizer, fit_prompts(tokenizer, prompts[:1], prompts, length))
    return prompt.ids


def test_texts_are_those_of_mlx_lm(smollm2):
    """Alone and in batches, with a quantised K/V cache, and in turns with a kept cache."""
    model, tokenizer = smollm2
    settings = CommonSettings(model, tokenizer, cast("Any", None), 9)
    drafters, plans = {"lookup": Lookup()}, [DraftPlan.of(1, 5, 5)]
    recording = Recording(None, "exact", {})
    found = decode_texts(settings, drafters, plans, _questions(tokenizer, 2), 4, recording)
    assert len(found) == 7 * 2
    different = [one for one in found if not one.is_equal]
    assert [one for one in different if not one.is_tie] == []
    # Only a quantised K/V cache rounds so far that texts in float32 differ.
    assert {one.conditions for one in different} <= {"8-bit K/V cache"}


def test_the_drafter_in_the_package_is_found_and_leaves_the_text_alone():
    model, tokenizer, drafter = load(real_folder(SMOLLM2), drafter="auto")
    assert isinstance(drafter, Drafter)
    steps = tokens = 0
    for question in _questions(tokenizer, 2):
        text = stock_tokens(model, question.ids, 28)  # it does not stop at the answer's end
        options: Any = {"drafter": drafter, "max_tokens": 28, "beam_width": 1}
        found = list(stream_generate(model, tokenizer, question.ids, **options))
        assert_same_tokens(text[: len(found)], [one.token for one in found], question.ids)
        tokens, steps = tokens + len(found), steps + len(found) / found[-1].tokens_per_step
    assert tokens / steps > 1.3


def test_trees_of_drafts_leave_the_text_alone(smollm2):
    model, tokenizer = smollm2
    prompts = [one.ids for one in _questions(tokenizer, 2)]
    texts = [stock_tokens(model, prompt, 16) for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        drafter = Scripted(ids(text), 49152, accuracy=0.8)
        found = tokens(model, prompt, drafter, tokenizer=tokenizer, **TREE)
        assert_same_tokens(text, found, prompt)
    sampled: dict[str, Any] = {"temp": 0.8, "seed": 3, "tokenizer": tokenizer}
    plain = tokens(model, prompts[0], max_tokens=16, **sampled)
    drafter = Scripted(plain, 49152, accuracy=0.8)
    assert tokens(model, prompts[0], drafter, **sampled, **TREE) == plain


@pytest.mark.parametrize(("length", "is_tree"), [(502, True), (700, False)])
def test_texts_cross_the_windows_of_gemma(gemma, length, is_tree):
    model, tokenizer = gemma
    prompt = _long_prompt(tokenizer, length)
    text = stock_tokens(model, prompt, 16)
    drafter = Scripted(ids(text), 262144, accuracy=0.8) if is_tree else "lookup"
    shape = TREE if is_tree else {"max_tokens": 16}
    assert_same_tokens(text, tokens(model, prompt, drafter, tokenizer=tokenizer, **shape))


def test_the_server_writes_the_text_of_mlx_lm(smollm2):
    model, tokenizer = smollm2
    (prompt,) = _questions(tokenizer, 1)
    text = mlx_lm.generate(model, tokenizer, prompt.ids, max_tokens=8)
    body = {"messages": [{"role": "user", "content": prompt.text}], "max_tokens": 8}
    with serving(Engine(model, tokenizer, "lookup")) as served:
        status, answer = served.send("/v1/chat/completions", body | {"temperature": 0})
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == text

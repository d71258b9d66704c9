"""Texts that the target writes many at once are those that it writes one by one."""

import json
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.engine.prompt_encoding import encode_user_turn
from mlx_redrafter.errors import ConfigError, DataError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import (
    DataOptions,
    Teacher,
    TeacherCache,
    TextGenerator,
    train_drafter,
)
from mlx_redrafter.training.data import Chat, Document
from mlx_redrafter.training.files import load_arrays
from mlx_redrafter.training.generated_texts import sample_posterior_noise
from mlx_redrafter.training.self_generated import GenerationJob, answer, sample
from mlx_redrafter.training.self_written import QUESTION_TOKENS, PromptWriter, count_prompts
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training.teacher_cache import Shard, unpack_sequences
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.models import tiny_llama
from tests.training.conftest import small_request
from tests.training.pieces import MODELS, Silent, WordTokenizer, kept_of, sequence

STOP = 7


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"llama4"}))  # in no batch of mlx-lm
def test_greedy_texts_are_those_of_mlx_lm(name):
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, length).tolist() for length in (1, 9, 4, 23, 2)]
    most = [30, 4, 30, 12, 1]
    counts: list[int] = []
    jobs = [GenerationJob(prompt, 0.0) for prompt in prompts]
    found = answer(Target(model), jobs, most, [STOP], counts.append)
    assert sum(counts) == sum(map(len, found))
    for prompt, text, longest in zip(prompts, found, most, strict=True):
        assert len(text) == longest or text[-1] == STOP
        assert text == ids(stock_tokens(model, prompt, len(text)))


def test_every_pass_can_be_interrupted():
    """A report between passes may end the work: prompts, answers, and reading."""
    target, jobs = Target(tiny_llama()), [GenerationJob([1] * 40, 0.0)] * 32
    counts: list[int] = []

    def stop(count: int) -> None:
        counts.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(target, jobs, [8] * 32, [], stop)
    assert counts == [0], "after the first part of the prompts"
    texts = [sequence([1] * 90)] * 20
    read: list[int] = []
    read_sequences(target, texts, 4, (), read.append)
    assert read == [512, 208, 512, 208, 360], "of 8 texts at once, 64 tokens of each"


def test_every_text_has_its_own_temperature():
    logits = mx.log(mx.array([[0.6, 0.3, 0.1]] * 4000))
    mx.random.seed(0)
    found = np.array(to_ints(sample(logits, [0.0, 1.0, 0.5, 1e-4] * 1000))).reshape(-1, 4)
    assert not found[:, [0, 3]].any()
    shares = [np.bincount(column, minlength=3) / 1000 for column in found.T]
    np.testing.assert_allclose(shares[1], [0.6, 0.3, 0.1], atol=0.05)
    np.testing.assert_allclose(shares[2], np.array([36, 9, 1]) / 46, atol=0.05)


@pytest.mark.parametrize("num_common", [0, 22])
@pytest.mark.parametrize("name", MODELS)
def test_what_generating_keeps_is_what_reading_finds(tmp_path, monkeypatch, name, num_common):
    """The last token of a generated text is in no pass, and no drafter reads its outputs."""
    # Prompts in several passes.
    monkeypatch.setattr("mlx_redrafter.training.teacher.MAX_CHUNK_TOKENS", 20)
    target = Target(MODELS[name]())
    target.modules.watch((1, 2))
    teacher = Teacher(target, TeacherCache(tmp_path, {}), "train", 8, (1, 2))
    rng = np.random.default_rng(1)
    common = rng.integers(8, 60, num_common).tolist()  # read once
    jobs = [
        GenerationJob(common + rng.integers(8, 60, length).tolist(), temp)
        for length, temp in ((1, 0.0), (13, 0.8), (4, 0.8), (23, 0.0), (2, 0.8))
    ]
    generator = TextGenerator(target, [STOP, 9, 11], 0)
    options = DataOptions(answer_tokens=40, sequence_length=50 + num_common)
    texts = generator.answer(teacher, iter(jobs), options, None, lambda count: None)
    assert len({len(text) for text in texts}) > 1
    kept = teacher.cache.load("train", 0, (1, 2))
    read = read_sequences(target, texts, 8, (1, 2))
    is_read = np.ones(kept.tokens.shape[0], np.bool_)
    is_read[np.array(kept.starts)[1:] - 1] = False
    for found, expected in zip(vars(kept).values(), vars(read).values(), strict=True):
        if found.shape[0] == len(is_read):
            where = mx.array(np.flatnonzero(is_read))
            np.testing.assert_allclose(
                np.array(found[where]), np.array(expected[where]), rtol=4e-3, atol=1e-3
            )
        else:
            assert mx.array_equal(found, expected)


def test_shards_of_generated_texts_are_kept_and_get_other_layers(tmp_path):
    target, cache = Target(tiny_llama()), TeacherCache(tmp_path, {})
    target.modules.watch((0,))
    options = DataOptions(answer_tokens=8)

    def run(layers: Sequence[int]) -> list[list[int]]:
        generator = TextGenerator(target, [STOP], 0)
        generator.round_size = 4
        jobs = (GenerationJob([1, 2 + number], 0.8) for number in range(10))
        teacher = Teacher(target, cache, "train", 8, layers)
        texts = generator.answer(teacher, jobs, options, None, lambda count: None, first=2)
        return [text.tokens.tolist() for text in texts]

    texts = run(())
    assert len(texts) == 10
    assert [number for number in range(9) if cache.has("train", number)] == [2, 3, 4]
    before = cache.path("train", 2).read_bytes()
    cache.path("train", 3).unlink()
    assert run(()) == texts, "as a run that was killed continues"
    assert cache.path("train", 2).read_bytes() == before
    assert run((0,)) == texts
    assert all(cache.load("train", number, (0,)).states is not None for number in (2, 3, 4))


@pytest.mark.parametrize(("total", "expected"), [(None, 20), (32, 4), (80, 10), (160, 20)])
def test_the_next_prompts_are_answered_and_those_of_some_rounds_sorted(tmp_path, total, expected):
    lengths = np.random.default_rng(5).permutation(20) + 1
    jobs = (GenerationJob([1] * int(length), 0.0) for length in lengths)
    target = Target(tiny_llama())
    teacher = Teacher(target, TeacherCache(tmp_path, {}), "train", 4, ())
    generator = TextGenerator(target, [], 0)  # every answer has 8 tokens
    generator.round_size = 1
    options = DataOptions(answer_tokens=8)
    texts = generator.answer(teacher, jobs, options, total, lambda count: None)
    found = [len(text) - 8 for text in texts]
    windows = [sorted(lengths[first:expected][:8]) for first in range(0, expected, 8)]
    assert found == [length for window in windows for length in window]


def test_no_more_than_the_asked_tokens_are_written(tmp_path):
    target = Target(tiny_llama())
    generator = TextGenerator(target, [STOP], 0)
    options = DataOptions(answer_tokens=16)
    for total in (1, 100, 1000):
        cache = TeacherCache(tmp_path / str(total), {})
        jobs = (GenerationJob([1, 2 + number % 50], 0.8) for number in range(10_000))
        seen: list[int] = []
        teacher = Teacher(target, cache, "train", 4, ())
        texts = generator.answer(teacher, jobs, options, total, seen.append)
        count = sum(int(text.is_trained.sum()) for text in texts)
        assert total <= count < total + 5 * options.answer_tokens
        assert sum(seen) == count


# Noise that a sampled text may have been sampled with


V, TEMP = 7, 0.8


def _shard(log_probs: np.ndarray, tokens: np.ndarray, k: int) -> Shard:
    """Texts of which the target knew these log-probabilities, shape (n, V)."""
    n = len(tokens)
    return Shard(
        tokens=mx.array(tokens.astype(np.int32)),
        is_trained=mx.ones((n,), dtype=mx.bool_),
        starts=mx.array([0, n]),
        hidden=mx.zeros((n, 2), dtype=mx.float16),
        **kept_of(log_probs, k),
    )


def _log_probs(n: int) -> np.ndarray:
    logits = np.repeat(np.random.default_rng(1).normal(size=(1, V)) * 2, n, axis=0)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("k", [3, V])
def test_under_it_the_target_chooses_the_text(k):
    log_probs = _log_probs(400)
    tokens = np.random.default_rng(2).integers(0, V, 400)
    shard = _shard(log_probs, tokens, k)
    noise = np.array(sample_posterior_noise(shard, mx.arange(399), V, TEMP))
    if k < V:  # the others share what is left
        others = np.argsort(-log_probs[0])[k:]
        left = np.log(np.exp(log_probs[0, others]).sum() / len(others))
        log_probs[:, others] = left
    np.testing.assert_array_equal(np.argmax(log_probs[:-1] / TEMP + noise, axis=-1), tokens[1:])


def test_over_the_texts_that_the_target_samples_it_is_gumbel_noise():
    n = 20_000
    log_probs = _log_probs(n)
    own = np.random.default_rng(3).gumbel(size=(n, V))
    tokens = np.roll(np.argmax(log_probs / TEMP + own, axis=-1), 1)
    noise = np.array(
        sample_posterior_noise(_shard(log_probs, tokens, V), mx.arange(n - 1), V, TEMP)
    )
    np.testing.assert_allclose(noise.mean(0), np.euler_gamma, atol=0.05)
    np.testing.assert_allclose(noise.std(0), np.pi / np.sqrt(6), atol=0.05)
    off_diagonal = np.corrcoef(noise.T) - np.eye(V)
    assert np.abs(off_diagonal).max() < 0.04


def test_a_row_depends_on_its_state_alone():
    tokens = np.arange(20) % V
    shard = _shard(_log_probs(20), tokens, V)
    all_rows = sample_posterior_noise(shard, mx.arange(19), V, TEMP)
    some = sample_posterior_noise(shard, mx.array([4, 11]), V, TEMP)
    assert mx.array_equal(some, all_rows[mx.array([4, 11])]).item()
    other = sample_posterior_noise(shard, mx.array([4, 11]), V, TEMP, seed=1)
    assert not mx.any(other == some).item()


# Prompts by the target itself: whole, unlike each other, and the same when read again

VOCAB = 64
WRITING = DataOptions(tokens=1000, answer_tokens=64)


def _tokenizer(has_chat_template: bool = True) -> WordTokenizer:
    """Every token id is a word."""
    tokenizer = WordTokenizer(has_chat_template)
    tokenizer.encode("[user] eol [assistant] " + " ".join(f"w{n}" for n in range(VOCAB)))
    return tokenizer


def test_the_place_of_the_users_text():
    tokenizer = _tokenizer()
    names = {number: word for word, number in tokenizer.words.items()}
    before, after = ([names[i] for i in ids] for ids in encode_user_turn(tokenizer))
    assert before == ["<s>", "[user]"]
    assert after == ["</s>", "eol", "[assistant]"]
    tokenizer.apply_chat_template = lambda *_, **__: "<s> hello"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"expected the user's message .* give texts"):
        encode_user_turn(tokenizer)


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompts_are_whole_and_unlike(is_chat, tmp_path):
    model = tiny_llama(vocab_size=VOCAB, spread=1.0)
    writer = PromptWriter(Target(model), _tokenizer(is_chat))
    found = writer.write(WRITING, tmp_path, Silent())
    items = [*found.prompts, *found.held_out]
    assert not found.given
    assert len(found.held_out) == 2
    assert len(items) >= count_prompts(WRITING) == 18
    if is_chat:
        texts = [item.messages[0]["content"] for item in items if isinstance(item, Chat)]
        assert not any("</s>" in text for text in texts)
    else:
        texts = [item.text for item in items if isinstance(item, Document)]
        assert {len(text.split()) for text in texts} == {32}
    assert len(set(texts)) == len(items)
    assert all(text.strip() for text in texts)
    again = PromptWriter(Target(tiny_llama(1, VOCAB)), _tokenizer(is_chat))
    assert again.write(WRITING, tmp_path, Silent()) == found, "the stored ones are read"


def test_a_template_with_much_text_leaves_room_for_a_question(tmp_path):
    """Without room, nothing but a stop token would end a question."""
    target = Target(tiny_llama(vocab_size=VOCAB, context=1024, spread=1.0))
    prefix = [3] * (WRITING.sequence_length + 10)
    writer = PromptWriter(target, _tokenizer())
    writer.prefix, writer.stop_tokens = prefix, [1]
    writer.write(WRITING, tmp_path, Silent())
    texts = unpack_sequences(load_arrays(tmp_path / "prompts-00000.safetensors")[0])
    assert max(len(text) for text in texts) <= len(prefix) + QUESTION_TOKENS


def test_a_model_that_asks_nothing_is_told(tmp_path):
    writer = PromptWriter(Target(tiny_llama(vocab_size=VOCAB)), _tokenizer())
    writer.stop_tokens = range(VOCAB)
    with pytest.raises(DataError, match=r"found 0 in 1.. tries; give texts with --data"):
        writer.write(WRITING, tmp_path, Silent())


def test_training_needs_no_texts(stories_file, tmp_path):
    """An adapter may be the model's; the card tells of both."""
    out, adapter = tmp_path / "drafter", tmp_path / "adapter"
    adapter.mkdir()
    lora = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    config = json.dumps({"num_layers": 1, "lora_parameters": lora})
    (adapter / "adapter_config.json").write_text(config)
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {})
    request, options = small_request(stories_file, out), DataOptions(tokens=1500, answer_tokens=64)
    training = replace(request.training, epochs=1)
    request = replace(request, adapter_path=adapter, data=(), data_options=options)
    reporter = Silent()
    assert train_drafter(replace(request, training=training), reporter) is not None
    assert reporter.stages[:3] == ["rehearsal", "writing prompts", "generating training text"]
    assert (out / "model.safetensors").exists()
    card = (out / "README.md").read_text()
    assert "with the adapter `adapter`, weights" in card
    assert "| files | none, the target wrote all texts |" in card
    assert "half greedily, half sampled at temperature 0.8." in card

"""Prompts by the target itself: whole, unlike each other, and the same when read again."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_redrafter.engine.prompt_encoding import encode_user_turn
from mlx_redrafter.errors import ConfigError, DataError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import DataOptions, train_drafter
from mlx_redrafter.training.data import Chat, Document
from mlx_redrafter.training.files import load_arrays
from mlx_redrafter.training.self_written import QUESTION_TOKENS, PromptWriter, count_prompts
from mlx_redrafter.training.teacher_cache import unpack_sequences
from tests.helpers.models import tiny_llama
from tests.training.conftest import small_request
from tests.training.pieces import Silent, WordTokenizer

VOCAB = 64
OPTIONS = DataOptions(tokens=200, answer_tokens=16)


def _tokenizer(has_chat_template: bool = True) -> WordTokenizer:
    """Every token id is a word."""
    tokenizer = WordTokenizer(has_chat_template)
    tokenizer.encode("[user] eol [assistant] " + " ".join(f"w{n}" for n in range(VOCAB)))
    return tokenizer


def test_the_place_of_the_users_text() -> None:
    tokenizer = _tokenizer()
    names = {number: word for word, number in tokenizer.words.items()}
    before, after = ([names[i] for i in ids] for ids in encode_user_turn(tokenizer))
    assert before == ["<s>", "[user]"]
    assert after == ["</s>", "eol", "[assistant]"]
    tokenizer.apply_chat_template = lambda *_, **__: "<s> hello"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"expected the user's message .* give texts"):
        encode_user_turn(tokenizer)


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompts_are_whole_and_unlike(is_chat: bool, tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=VOCAB, spread=1.0)
    writer = PromptWriter.of(Target(model), _tokenizer(is_chat))
    found = writer.write(OPTIONS, tmp_path, Silent())
    items = [*found.prompts, *found.held_out]
    assert not found.given
    assert len(found.held_out) == 2
    assert len(items) >= count_prompts(OPTIONS) == 15
    if is_chat:
        texts = [item.messages[0]["content"] for item in items if isinstance(item, Chat)]
        assert not any("</s>" in text for text in texts)
    else:
        texts = [item.text for item in items if isinstance(item, Document)]
        assert {len(text.split()) for text in texts} == {32}
    assert len(set(texts)) == len(items)
    assert all(text.strip() for text in texts)
    again = PromptWriter.of(Target(tiny_llama(1, VOCAB)), _tokenizer(is_chat))
    assert again.write(OPTIONS, tmp_path, Silent()) == found, "the stored ones are read"


def test_a_template_with_much_text_leaves_room_for_a_question(tmp_path: Path) -> None:
    """Without room, nothing but a stop token would end a question."""
    target = Target(tiny_llama(vocab_size=VOCAB, context=1024, spread=1.0))
    prefix = [3] * (OPTIONS.sequence_length + 10)
    writer = replace(PromptWriter.of(target, _tokenizer()), prefix=prefix, stop_tokens=[1])
    writer.write(OPTIONS, tmp_path, Silent())
    texts = unpack_sequences(load_arrays(tmp_path / "prompts-00000.safetensors")[0])
    assert max(len(text) for text in texts) <= len(prefix) + QUESTION_TOKENS


def test_a_model_that_asks_nothing_is_told(tmp_path: Path) -> None:
    writer = PromptWriter.of(Target(tiny_llama(vocab_size=VOCAB)), _tokenizer())
    writer = replace(writer, stop_tokens=range(VOCAB))
    with pytest.raises(DataError, match=r"found 0 in 1.. tries; give texts with --data"):
        writer.write(OPTIONS, tmp_path, Silent())


def test_training_needs_no_texts(stories_file: Path, tmp_path: Path) -> None:
    request = small_request(stories_file, tmp_path / "drafter")
    options = DataOptions(tokens=1500, answer_tokens=64)
    training = replace(request.training, epochs=1)
    reporter = Silent()
    result = train_drafter(
        replace(request, data=(), data_options=options, training=training), reporter
    )
    assert result is not None
    assert reporter.stages[:3] == ["rehearsal", "writing prompts", "generating training text"]
    assert (tmp_path / "drafter" / "model.safetensors").exists()

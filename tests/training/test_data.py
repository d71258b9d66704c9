"""Texts, chats and prompts from files; what is wrong with one is said with its line."""

import json
from typing import Any, cast

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import DataError
from mlx_redrafter.training.corpus import as_prompt_source, divide, encode_given
from mlx_redrafter.training.data import (
    Chat,
    Document,
    Encoder,
    TokenSequence,
    read_items,
    split_text,
)
from mlx_redrafter.training_options import DataOptions
from tests.training.pieces import Silent, WordTokenizer


def _encoder(tokenizer: WordTokenizer, length: int = 100, vocab_size: int = 1000) -> Encoder:
    return Encoder(cast(TokenizerWrapper, tokenizer), length, vocab_size)


def _trained_text(sequence: TokenSequence, tokenizer: WordTokenizer) -> str:
    return tokenizer.decode([int(t) for t in sequence.tokens[sequence.is_trained]])


def _chat(*turns: str) -> Chat:
    """A chat of turns such as "user: hi"."""
    pairs = (turn.split(": ") for turn in turns)
    return Chat([{"role": role, "content": content} for role, content in pairs], "x:1")


def test_plain_text_is_divided_at_separators(tmp_path):
    path = tmp_path / "a.txt"
    text = "\none\n\ntwo\n<|endoftext|>\n\n<|endoftext|>\nthree\n"
    path.write_text(text, encoding="utf-8-sig")  # whose byte order mark is no text
    expected = [Document("one\n\ntwo", f"{path}:1"), Document("three", f"{path}:8")]
    assert read_items([path]) == expected


def test_rows_of_all_kinds(tmp_path):
    messages = _chat("user: hi", "assistant: ho").messages
    path, ask = tmp_path / "a.JSONL", {"prompt": "ask"}
    rows = {"text": "one"}, {"messages": messages}, ask, {**ask, "completion": "told"}
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8-sig")
    text, chat, prompt, told = read_items([path])
    assert text == Document("one", f"{path}:1")
    assert chat == Chat(messages, f"{path}:2")
    assert (prompt.is_answered, told.is_answered) == (False, True)


def test_a_prompt_file_has_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("why\n\nhow\n", encoding="utf-8-sig")
    items = read_items([path], lines_are_prompts=True)
    assert [item.messages[0]["content"] for item in items] == ["why", "how"]


BAD_ROWS = [
    ("{", "expected a JSON object"),
    ('{"txt": 1}', "found the keys 'txt'"),
    ('{"text": 5}', '"text" to be a text, found 5'),
    ('{"messages": []}', '"messages" to be a list'),
    ('{"messages": [{"role": "king", "content": "x"}]}', "message 1 to have one of the roles"),
    ('{"messages": [{"role": "user", "content": [1]}]}', "message 1 to have a text"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "a message before the assistant's"),
    ("[" * 100_000, "expected a JSON object"),
    ('{"text": "a \\uD800 b"}', "expected a JSON object, found .* surrogates not allowed"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_named_by_line(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{row}\n', encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        read_items([path])
    assert str(error.value).startswith(f"{path}:3: ")


def test_bad_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("fine\nfür\n".encode("latin-1"))
    for name, message in (
        ("missing.txt", r"cannot read .*missing.txt: No such file"),
        ("empty.txt", r"expected texts in .*empty.txt, found none"),
        ("latin.txt", r"latin.txt:\d: expected UTF-8, found the byte 0xfc"),
        ("a.json", r"expected a text or .jsonl file"),
        (".", "cannot read"),
    ):
        with pytest.raises(DataError, match=message):
            read_items([tmp_path / name])


def test_only_the_replies_of_a_chat_are_trained():
    tokenizer = WordTokenizer()
    asked = "system: be brief", "user: who are you"
    chat = _chat(*asked, "assistant: a model", "user: and I", "assistant: a user")
    (sequence,) = _encoder(tokenizer).encode(chat)
    assert _trained_text(sequence, tokenizer) == "a model </s> a user </s>"
    text = tokenizer.decode(sequence.tokens.tolist())
    assert text == tokenizer.apply_chat_template(chat.messages, False, False)


class ForgetfulTokenizer(WordTokenizer):
    """Its template leaves the thoughts out of earlier replies, as reasoning models do.

    Words that begin with a star are thoughts.
    """

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        last = len(messages) - 1

        def content(i: int) -> str:
            words = messages[i]["content"].split()
            return " ".join(w for w in words if i == last or not w.startswith("*"))

        shown = [{**m, "content": content(i)} for i, m in enumerate(messages)]
        return super().apply_chat_template(shown, **options)


def test_a_template_that_rewrites_earlier_replies_gives_several_sequences():
    tokenizer = ForgetfulTokenizer()
    chat = _chat("user: q1", "assistant: *hm a1", "user: q2", "assistant: *oh a2")
    first, second = _encoder(tokenizer).encode(chat)
    assert _trained_text(first, tokenizer) == "*hm a1 </s>"
    assert _trained_text(second, tokenizer) == "*oh a2 </s>"
    assert "*hm" not in tokenizer.decode(second.tokens.tolist())


def test_two_replies_in_a_row_keep_tokens_and_marks_together():
    tokenizer = ForgetfulTokenizer()
    chat = _chat("user: q", "assistant: *hm a1", "assistant: *hm a2")
    first, second = _encoder(tokenizer).encode(chat)
    assert _trained_text(first, tokenizer) == "*hm a1 </s>"
    assert len(second.tokens) == len(second.is_trained)
    assert "q" not in _trained_text(second, tokenizer)


def test_a_greeting_is_part_of_the_prompt():
    tokenizer = WordTokenizer()
    chat = _chat("assistant: hello", "user: q", "assistant: a")
    (sequence,) = _encoder(tokenizer).encode(chat)
    assert _trained_text(sequence, tokenizer) == "a </s>"
    assert "hello" in tokenizer.decode(sequence.tokens.tolist())


def test_a_long_prompt_keeps_its_question_and_leaves_room():
    tokenizer, options = WordTokenizer(), DataOptions(sequence_length=40)
    chat = _chat("system: " + "s " * 50, "user: why")
    source = as_prompt_source(chat, _encoder(tokenizer, 40), options)
    assert len(source.tokens) == 20
    text = tokenizer.decode(source.tokens)
    assert text.startswith("<s> s s")
    assert text.endswith("[user] why </s> eol [assistant]")


def test_chats_without_a_reply_in_a_sequence_are_counted():
    """A long system prompt leaves no room for a reply to train on."""
    options = DataOptions(sequence_length=16)
    long, plain = _chat(f"user: {'q ' * 20}", "assistant: a"), WordTokenizer(False)
    assert not encode_given([long], _encoder(plain, 16), options, 0.5, Silent())
    encoder = _encoder(WordTokenizer(), 16)
    long, short = (_chat(f"system: {'s ' * n}", "user: q", "assistant: a") for n in (20, 2))
    reporter = Silent()
    (sequence,) = encode_given([long, short, long], encoder, options, 0.5, reporter)
    assert sequence.is_trained.sum() == 2
    assert reporter.lines == ["2 chats are left out, as no reply begins in their first 16 tokens"]
    few = DataOptions(tokens=2, sequence_length=16)
    assert len(encode_given([short] * 3, encoder, few, 0.5, reporter)) == 1
    assert not encode_given([short], encoder, options, 0.0, reporter)
    assert len(reporter.lines) == 1


def test_beginnings_leave_room_in_short_sequences():
    text, rng = Document("a b c d e f g h " * 9, "x:1"), np.random.default_rng(0)
    options = DataOptions(sequence_length=16)
    source = as_prompt_source(text, _encoder(WordTokenizer(), 16), options)
    assert max(len(source.draw_prompt(rng)) for _ in range(50)) == 8


@pytest.mark.parametrize("item", [Document("\u200b", "x:1"), _chat("user: \u200b")])
def test_a_prompt_without_tokens_is_named(item):
    tokenizer = WordTokenizer(has_chat_template=False)
    tokenizer.encode = lambda *_, **__: []  # type: ignore[method-assign, assignment]
    with pytest.raises(DataError, match="x:1: expected a text, found no token"):
        as_prompt_source(item, _encoder(tokenizer), DataOptions())


def test_prompts_are_rendered_as_served():
    tokenizer = WordTokenizer()
    prompt = _chat("user: why")
    ids = _encoder(tokenizer).encode_prompt(prompt)
    assert tokenizer.decode(ids) == "<s> [user] why </s> eol [assistant]"
    plain = WordTokenizer(has_chat_template=False)
    assert plain.decode(_encoder(plain).encode_prompt(prompt)) == "<s> why"


def test_without_a_template_prompt_and_completion_follow_each_other():
    tokenizer = WordTokenizer(has_chat_template=False)
    row = _chat("user: a b", "assistant: c d")
    (sequence,) = _encoder(tokenizer).encode(row)
    assert tokenizer.decode(sequence.tokens.tolist()) == "<s> a b c d"
    assert _trained_text(sequence, tokenizer) == "c d"
    chat = _chat("system: x", "user: a b", "assistant: c d")
    with pytest.raises(DataError, match="x:1: expected a model with a chat template"):
        list(_encoder(tokenizer).encode(chat))


def test_a_refusal_of_the_template_names_the_line():
    encoder = _encoder(WordTokenizer(strict_roles=True))
    chat = _chat("system: x")
    with pytest.raises(DataError, match=r"x:1: the model's chat template rejects .*user"):
        encoder.encode_prompt(chat)


def test_long_texts_are_cut_and_begin_alike():
    tokenizer = WordTokenizer()
    words = [f"w{i}" for i in range(25)]
    sequences = list(_encoder(tokenizer, 8).encode(Document(" ".join(words), "x:1")))
    assert all(len(s) <= 8 and s.tokens[0] == 0 and not s.is_trained[0] for s in sequences)
    assert " ".join(_trained_text(s, tokenizer) for s in sequences).split() == words


def test_token_ids_beyond_the_model_are_refused():
    encoder = _encoder(WordTokenizer(), vocab_size=3)
    with pytest.raises(DataError, match="x:1: expected token ids below 3, found 4"):
        list(encoder.encode(Document("a b c", "x:1")))
    with pytest.raises(DataError, match="x:2: expected token ids below 3, found"):
        encoder.encode_prompt(Chat([{"role": "user", "content": "a b c"}], "x:2"))


def test_pieces_make_up_the_text():
    text = "one two\nthree " * 40
    pieces = list(split_text(text, 50))
    assert "".join(pieces) == text
    assert all(len(piece) <= 50 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert list(split_text("x" * 12, 5)) == ["xxxxx", "xxxxx", "xx"]


def test_held_out_items_are_not_trained_on():
    data = [Document(f"text {i}", f"x:{i}") for i in range(40)]
    sources = divide(data, [], DataOptions(held_out=8))
    assert len(sources.held_out) == 4
    assert len(sources.given) == 36
    assert not set(map(str, sources.held_out)) & set(map(str, sources.given))
    assert sources == divide(data, [], DataOptions(held_out=8))
    asked = [_chat(f"user: {i}") for i in range(20)]
    sources = divide(data, asked, DataOptions())
    assert len(sources.given) == 40
    assert len(sources.prompts) == 18
    assert len(sources.held_out) == 2
    with pytest.raises(DataError, match="at least two texts"):
        divide(data[:1], [], DataOptions())


def test_no_other_sequence_starts_from_a_held_out_prompt():
    """Files repeat prompts, and may have the answer to a prompt of another file."""
    data = [_chat(f"user: {i}", f"assistant: {reply}") for i in range(4) for reply in "ab"]
    sources = divide(data, [_chat(f"user: {i % 4}") for i in range(40)], DataOptions(held_out=1))
    (held_out,) = {str(item.messages) for item in sources.held_out if isinstance(item, Chat)}
    for items, count in ((sources.prompts, 30), (sources.given, 6)):
        assert len(items) == count
        assert held_out not in {str(item.asked) for item in items if isinstance(item, Chat)}
    few = r"at least two texts or prompts that differ.* found 1: x:\d"
    for same in ([_chat("user: 1")] * 9, [Document("one", f"x:{i}") for i in range(9)]):
        with pytest.raises(DataError, match=few):
            divide(data if isinstance(same[0], Chat) else [], same, DataOptions())

"""A conversation: the answers of plain decoding, although only what is new is read."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter import Engine, stream_generate
from mlx_redrafter.engine.conversation import Conversation
from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.lookup import Contexts
from mlx_redrafter.proposers.lookup.lookup import LookupDrafting
from tests.helpers.models import ByteTokenizer, tiny_llama, wrapped_tokenizer
from tests.models.tiny_models import build, tiny_config
from tests.unit.test_engine import DRAFTERS

VOCAB_SIZE = 64
ASKED = ["HOW ARE YOU", "AND YOU", "HOW ARE YOU"]


class ChatTokenizer(ByteTokenizer):
    """A tokenizer with a chat template that shortens earlier messages to ``kept`` characters."""

    chat_template: Any = "in Python"

    def __init__(self, kept: int | None = None):
        super().__init__(VOCAB_SIZE)
        self.kept = kept

    def apply_chat_template(self, messages: Any, **_: Any) -> str:  # type: ignore[override]
        """All messages, and the beginning of an answer."""
        *earlier, last = [f"[{one['role'][0].upper()}]{one['content']}" for one in messages]
        return "".join(text[: self.kept] for text in earlier) + last + "[A]"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=4)


def _tokenizer(kept: int | None = None) -> TokenizerWrapper:
    wrapper = TokenizerWrapper(ChatTokenizer(kept))
    wrapper._eos_token_ids = set()
    return wrapper


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("sampling", "kept"), [({}, 5), ({"temp": 0.9, "seed": 3}, None)])
def test_answers_are_those_of_plain_decoding(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    sampling: dict[str, Any],
    kept: int | None,
) -> None:
    monkeypatch.setattr("mlx_redrafter.proposers.draft_model.check_ids", lambda *_: None)
    _assert_plain_answers(model, DRAFTERS[drafter](model), kept, sampling)


@pytest.mark.parametrize("kept", [None, 5])
@pytest.mark.parametrize("model_type", ["qwen3_5", "mamba2"])
def test_answers_of_models_with_states(model_type: str, kept: int | None) -> None:
    """A state cannot be cut where a template shortens, and the tokens in it may be unknown."""
    config, sizes = tiny_config(model_type), {"vocab_size": VOCAB_SIZE}
    sizes["max_position_embeddings"] = 512
    inner = {**config.get("text_config", {}), **sizes}
    model = build({**config, **sizes, "text_config": inner})
    _assert_plain_answers(model, "lookup", kept, {"temp": 0.9, "seed": 3})


def _assert_plain_answers(
    model: nn.Module, drafter: Any, kept: int | None, sampling: dict[str, Any]
) -> None:
    tokenizer = _tokenizer(kept)
    conversation = Conversation(Engine(model, tokenizer, drafter), "BE GOOD")
    for text in ASKED:
        asked = [*conversation.messages, {"role": "user", "content": text}]
        found = list(conversation.ask(text, max_tokens=14, **sampling))
        prompt = encode_chat(tokenizer, asked)
        plain = stream_generate(model, tokenizer, prompt, drafter=None, max_tokens=14, **sampling)
        assert [one.token for one in found] == [one.token for one in plain]
        answer = {"role": "assistant", "content": "".join(one.text for one in found)}
        assert conversation.messages == [*asked, answer]


def test_only_what_is_new_is_read(model: nn.Module) -> None:
    conversation = Conversation(Engine(model, _tokenizer(), "lookup"))
    read: list[int] = []
    options: dict[str, Any] = {"prompt_progress_callback": lambda done, total: read.append(total)}
    for text in ASKED:
        list(conversation.ask(text, max_tokens=8, **options))
    # "[U]", the text and "[A]".
    assert sorted(set(read)) == sorted({len(text) + 6 for text in ASKED})


@pytest.mark.parametrize("drafter", ["lookup", "network"])
def test_a_turn_drafts_from_the_turns_before_it(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    engine, begun = Engine(model, _tokenizer(), DRAFTERS[drafter](model)), list[Contexts]()

    def begin(drafting: LookupDrafting, contexts: Contexts, *args: Any) -> None:
        begun.append(contexts)
        init(drafting, contexts, *args)

    init = LookupDrafting.__init__
    monkeypatch.setattr(LookupDrafting, "__init__", begin)
    one, other = Conversation(engine), Conversation(engine)
    for text in ASKED:
        list(one.ask(text, max_tokens=8))
    list(other.ask(ASKED[0], max_tokens=8))
    assert begun[:3] == [begun[0]] * 3
    assert begun[3] is not begun[0]
    # Nothing is read twice, but drafts may be accepted beyond the end of an answer.
    assert len(one._tokens) <= len(begun[0].tokens) < len(one._tokens) + 40
    assert bool(begun[0].candidates(begun[0].end.key)[0]) == (drafter == "lookup")


def test_an_answer_that_is_left_goes_on_as_far_as_it_was_read(model: nn.Module) -> None:
    tokenizer = _tokenizer()
    conversation = Conversation(Engine(model, tokenizer, "lookup"))
    answer = conversation.ask(ASKED[0], max_tokens=50)
    text = "".join(next(answer).text for _ in range(5))
    answer.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1]["content"] == text
    asked = [*conversation.messages, {"role": "user", "content": ASKED[1]}]
    plain = stream_generate(
        model, tokenizer, encode_chat(tokenizer, asked), drafter=None, max_tokens=20
    )
    found = conversation.ask(ASKED[1], max_tokens=20)
    assert [one.token for one in found] == [one.token for one in plain]


def test_what_is_refused_changes_nothing(model: nn.Module) -> None:
    conversation = Conversation(Engine(model, _tokenizer(), "lookup"))
    list(conversation.ask(ASKED[0], max_tokens=8))
    before = list(conversation.messages)
    with pytest.raises(ConfigError, match="max_tokens"):
        list(conversation.ask(ASKED[1], max_tokens=-5))
    assert conversation.messages == before
    assert len(list(conversation.ask(ASKED[1], max_tokens=8))) == 8
    with pytest.raises(ConfigError, match="chat template"):
        Conversation(Engine(model, wrapped_tokenizer(VOCAB_SIZE), None))

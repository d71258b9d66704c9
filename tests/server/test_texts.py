"""The texts over a socket are those of `stream_generate`, whatever else the server does."""

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlx_redrafter import load, stream_generate
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.prompt_encoding import encode_chat, encode_prompt
from mlx_redrafter.engine.responses import GenerationResponse
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.job import Job
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.prefix_store import PrefixStore
from mlx_redrafter.server.protocols.openai_chat import read
from mlx_redrafter.server.protocols.openai_completions import read as read_prompt
from mlx_redrafter.server.replies import Reply
from mlx_redrafter.server.worker import Worker
from tests.helpers.calls import at_call
from tests.helpers.models import chat_tokenizer, tiny_llama
from tests.server.serving import PATH, Served, serving

MESSAGES: list[Any] = [{"role": "user", "content": "HOW ARE YOU"}]


def _responses(served: Served, prompt: Any, **options: Any) -> list[GenerationResponse]:
    engine = served.engine
    options = {"drafter": None, "max_tokens": 30, **options}
    return list(stream_generate(engine.target.model, engine.tokenizer, prompt, **options))


def _text(served: Served, prompt: Any, **options: Any) -> str:
    return "".join(one.text for one in _responses(served, prompt, **options))


@pytest.fixture
def client(served: Served) -> Any:
    with served.openai() as one:
        yield one


def test_chat_and_several_choices(served, client):
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0.8, seed=7, n=3
    )
    prompt = encode_chat(served.engine.tokenizer, MESSAGES)
    expected = [_text(served, prompt, temp=0.8, seed=seed) for seed in (7, 8, 9)]
    assert [one.message.content for one in reply.choices] == expected
    assert [one.finish_reason for one in reply.choices] == ["length"] * 3
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 90
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is not None
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_stream_with_log_probabilities_and_usage(served, client):
    options: Any = {"max_completion_tokens": 12, "logprobs": True, "top_logprobs": 2}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    prompt = encode_chat(served.engine.tokenizer, MESSAGES)
    expected = _responses(served, prompt, max_tokens=12)
    text = "".join(one.choices[0].delta.content or "" for one in chunks)
    assert text == "".join(one.text for one in expected)
    assert [one.choices[0].delta.role for one in chunks] == ["assistant", *[None] * 11]
    assert last.usage.completion_tokens == 12
    assert chunks[-1].choices[0].finish_reason == "length"
    scored = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs is not None]
    shown = [token for one in scored for token in one.content or ()]
    assert len(shown) == 12
    for token, response in zip(shown, expected, strict=True):
        value = response.logprobs[response.token].item()
        assert token.logprob == pytest.approx(value, abs=1e-4)
        assert token.token == response.text == bytes(token.bytes or []).decode()
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_penalties_see_the_prefix_in_the_cache(served):
    penalties: dict[str, Any] = {
        "presence_penalty": 1.5,
        "presence_context_size": 60,
        "repetition_penalty": 1.3,
        "repetition_context_size": 40,
    }
    body = {"prompt": "ONCE UPON A TIME THERE WAS A", "logit_bias": {"5": -3.5}, **penalties}
    processors = make_logits_processors(logit_bias={5: -3.5}, **penalties)
    expected = _text(served, body["prompt"], logits_processors=processors)
    for _ in range(2):
        status, reply = served.send(PATH, body)
        assert (status, reply["choices"][0]["text"]) == (200, expected)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(body["prompt"]) - 1


def test_completions_of_several_prompts(served):
    prompts = ["THE CAT", "THE DOG"]
    body = {"prompt": prompts, "max_tokens": 5, "logprobs": 1, "n": 2}
    _, reply = served.send(PATH, body)
    expected = [_text(served, one, max_tokens=5) for one in prompts for _ in range(2)]
    assert [one["text"] for one in reply["choices"]] == expected
    shown = reply["choices"][0]["logprobs"]
    assert "".join(shown["tokens"]) == expected[0]
    assert shown["text_offset"] == list(range(5))
    assert [len(one) for one in shown["top_logprobs"]] == [1] * 5


def test_offsets_of_a_stream_are_those_of_the_whole(served, client):
    """Also while a text that may become a stop string is held back."""
    prompt = "THE OLD MAN"
    stop = _text(served, prompt)[3:6] + "\x7f"
    options: Any = {"model": "tiny", "prompt": prompt, "stop": [stop], "logprobs": 0}
    whole = client.completions.create(**options).choices[0].logprobs.text_offset
    parts = [one.choices[0].logprobs for one in client.completions.create(**options, stream=True)]
    assert [offset for one in parts for offset in one.text_offset] == whole


def test_stop_strings(served, client):
    prompt = "THE OLD MAN"
    full = _text(served, prompt)
    stop = full[11:14]
    options: Any = {"model": "tiny", "prompt": prompt, "stop": ["\x7f\x7f", stop]}
    whole = client.completions.create(**options).choices[0]
    parts = [one.choices[0] for one in client.completions.create(**options, stream=True)]
    assert whole.text == "".join(one.text for one in parts) == full[: full.index(stop)]
    assert whole.finish_reason == parts[-1].finish_reason == "stop"
    assert served.text(prompt=prompt) == full


def test_many_clients_at_once(served):
    """8 clients, some of whom go away in the middle of a prompt or a text."""
    draw = random.Random(1)
    prompts = ["".join(draw.choices("ABCD EFG", k=draw.choice([3, 20, 90]))) for _ in range(10)]
    cases = []
    for prompt, (temp, seed) in product(prompts, ((0, 0), (1.0, 5))):
        expected = _text(served, prompt, temp=temp, seed=seed, max_tokens=16)
        body = {"prompt": prompt, "temperature": temp, "seed": seed, "max_tokens": 16}
        cases.append((body, expected))

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(8):
            time.sleep(draw.random() * 0.02)
            if draw.random() < 0.3:
                with closing(served.begin(prompt="AB CD " * 60, max_tokens=100)):
                    time.sleep(draw.random() * 0.2)
            else:
                body, expected = draw.choice(cases)
                assert served.text(**body) == expected, body

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, range(8)))  # which raises what they raise
    served.wait_until_idle()
    assert served.worker.counters.texts["failed"] == 0
    assert served.worker.counters.texts["cancelled"] > 0


def test_requests_beside_others_with_several_choices_do_not_fail(served):
    """A request that ends between the chunks of another one's prompt has ended once."""

    def ask(number: int) -> None:
        several: dict[str, Any] = {"n": 8, "seed": 1} if number % 2 else {}
        for i in range(6):
            served.text(prompt="ONCE UPON A TIME THERE WAS A", max_tokens=1 + i % 5, **several)

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(ask, range(4)))
    served.wait_until_idle()


def test_prompts_that_wait_together_share_their_passes(monkeypatch):
    """In a worker without a thread."""
    model, worker = tiny_llama(context=8192), Worker(Limits())
    engine = Engine(model, chat_tokenizer(), None)
    defaults = GenerationOptions(max_tokens=4, prefill_step_size=2048)
    loaded = LoadedModel(engine, defaults, PrefixStore(0))
    prompts = [f"{i} TIMES THE CAT SAT ON THE OLD MAT, AND SO ON" for i in range(4)]
    expected = [engine.generate(prompt, max_tokens=4) for prompt in prompts]
    shapes, found = list[tuple[int, ...]](), {prompt: "" for prompt in prompts}
    note = lambda model, tokens, *_, **options: shapes.append(tokens.shape)  # noqa: E731

    def submit(prompt: str) -> None:
        def receive(*parts: Part | None) -> None:
            found[prompt] += "".join(part.content for part in parts if part is not None)

        request, _ = read_prompt({"prompt": prompt}, defaults)
        worker.submit(Job(loaded, request, [engine.tokenizer.encode(prompt)], receive))

    at_call(monkeypatch, type(model), "__call__", note)
    for prompt in prompts:
        submit(prompt)
    while sum(map(len, found.values())) < 16:
        worker._admit()
        worker._step_all()
    assert list(found.values()) == expected
    # One pass instead of four; the first step of the batch reads the last token of each.
    length = len(prompts[0])
    assert [one for one in shapes if one[1] > length // 2] == [(4, length - 1)]


def test_all_that_has_come_is_one_write():
    """The parts of a step, and those of later steps until the client's turn, in their order."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"messages": [{"role": "user", "content": "Hi"}], **stream}
    request, make_writer = read(asked, GenerationOptions())
    parts = [Part(0, False, 1, 0, 0, 0, content="a"), Part(0, True, 2, 1, 3, 1, content="b")]
    last = Part(0, True, 3, 2, 3, 1, content="c", finish_reason="stop")

    async def collect() -> list[str]:
        reply = Reply(cast(Any, None), request, [[7, 8]], make_writer("tiny"), 0.0)
        reply.job.receive(*parts)
        reply.job.receive(last)
        reply.job.receive(None)
        return [text async for text in reply.events()]

    (text,) = asyncio.run(collect())
    *events, end = text.removesuffix("\n\n").split("\n\n")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [one["choices"][0]["delta"]["content"] for one in found[:-1]] == ["a", "b", "c"]
    usage = found[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 1)
    assert end == "data: [DONE]"


def test_a_prompt_has_its_likelihoods(served, monkeypatch):
    monkeypatch.setattr("mlx_redrafter.server.parts.CHUNK", 4)
    tokens = [7, 3, 22, 9, 41, 5, 5, 60, 13]
    body = {"prompt": [tokens, tokens[:5]], "echo": True, "logprobs": 2, "max_tokens": 1}
    status, reply = served.send(PATH, body)
    assert status == 200
    model: Any = served.engine.target.model
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for choice, prompt in zip(reply["choices"], body["prompt"], strict=True):
        shown, length = choice["logprobs"], len(prompt)
        assert len(shown["token_logprobs"]) == length + 1
        assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
        found = shown["token_logprobs"][1:length]
        np.testing.assert_allclose(found, expected[range(length - 1), prompt[1:]], atol=1e-4)
        best = [max(one.values()) for one in shown["top_logprobs"][1:length]]
        np.testing.assert_allclose(best, expected[: length - 1].max(axis=1), atol=1e-4)
        decoded = served.engine.tokenizer.decode(prompt)
        assert choice["text"].startswith(decoded)
        assert choice["text"] == decoded + served.text(prompt=prompt, max_tokens=1)
        assert reply["usage"]["completion_tokens"] == 2


def test_a_prompt_alone_is_scored(served):
    """Without a token of an answer, as clients ask that compare likelihoods."""
    body = {"prompt": [7, 3, 22], "echo": True, "logprobs": 1, "max_tokens": 0}
    _, reply = served.send(PATH, body)
    _, longer = served.send(PATH, {**body, "max_tokens": 1})
    (choice,), (more,) = reply["choices"], longer["choices"]
    assert choice["logprobs"]["token_logprobs"] == more["logprobs"]["token_logprobs"][:3]
    assert more["text"].startswith(choice["text"])
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 0)
    assert served.send(PATH, {**body, "echo": False})[0] == 400
    again = served.send(PATH, body)[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing continues it"
    full = {**body, "prompt": [7] * 512}
    assert served.send(PATH, full)[0] == 200, "it needs no room for an answer"
    assert served.send(PATH, {**full, "max_tokens": 1})[0] == 400


def test_every_text_of_a_request_may_fill_the_context(served):
    prompts = [[7], [7] * 500]
    _, both = served.send(PATH, {"prompt": prompts, "max_tokens": 60})
    alone = [served.send(PATH, {"prompt": prompt, "max_tokens": 60})[1] for prompt in prompts]
    assert [one["choices"][0]["text"] for one in alone] == [one["text"] for one in both["choices"]]
    assert [one["usage"]["completion_tokens"] for one in alone] == [60, 12]


@pytest.fixture(scope="module")
def bundled() -> Any:
    with serving(Engine(*load())) as one:
        yield one


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["It cost 5, he said", "Once upon a"])
def test_tokens_stand_where_the_text_has_them(bundled, prompt, echo):
    """Its tokenizer leaves out the blank at the beginning of a text."""
    body = {"prompt": prompt, "max_tokens": 8, "logprobs": 1, "echo": echo}
    (choice,) = bundled.send(PATH, body)[1]["choices"]
    tokens = encode_prompt(bundled.engine.tokenizer, prompt)
    written = [one.token for one in _responses(bundled, prompt, max_tokens=8)]
    whole = bundled.engine.tokenizer.decode([*tokens, *written])
    assert choice["text"] == (whole if echo else whole.removeprefix(prompt).removeprefix(" "))
    found = choice["logprobs"]
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][start:].startswith(token)
    assert found["tokens"][-8:] == [next(iter(top)) for top in found["top_logprobs"][-8:]]

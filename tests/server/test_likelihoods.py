"""Log-probabilities of a prompt are those of stock mlx-lm's model."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.server import parts
from tests.server.serving import Served


def test_a_prompt_is_repeated_with_its_likelihood(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK", 4)
    tokens = [7, 3, 22, 9, 41, 5, 5, 60, 13]
    body = {"prompt": [tokens, tokens[:5]], "echo": True, "logprobs": 2, "max_tokens": 1}
    status, reply = served.send("/v1/completions", body)
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
        plain = served.send("/v1/completions", {"prompt": prompt, "max_tokens": 1})[1]
        assert choice["text"] == decoded + plain["choices"][0]["text"]
        assert reply["usage"]["completion_tokens"] == 2


def test_a_prompt_alone_is_scored(served: Served) -> None:
    """Without a token of an answer, as clients ask that compare likelihoods."""
    body = {"prompt": [7, 3, 22], "echo": True, "logprobs": 1, "max_tokens": 0}
    _, reply = served.send("/v1/completions", body)
    _, longer = served.send("/v1/completions", {**body, "max_tokens": 1})
    (choice,), (more,) = reply["choices"], longer["choices"]
    assert choice["logprobs"]["token_logprobs"] == more["logprobs"]["token_logprobs"][:3]
    assert more["text"].startswith(choice["text"])
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 0)
    assert served.send("/v1/completions", {**body, "echo": False})[0] == 400
    again = served.send("/v1/completions", body)[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing continues it"

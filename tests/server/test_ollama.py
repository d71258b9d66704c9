"""Ollama's protocol, spoken by its own client over a socket."""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mlx_redrafter.server.protocols.ollama import read_chat
from tests.server.serving import CITY, DEFAULTS, KEY, Served, wait_until

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
MESSAGES = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def client(calling: Served) -> Any:
    ollama = pytest.importorskip("ollama", reason="the client of this protocol")
    one = ollama.Client(host=calling.root, headers={"Authorization": f"Bearer {KEY}"})
    yield one
    one._client.close()


def test_chats_with_and_without_tools(client):
    first = client.chat("tiny", MESSAGES, tools=[TOOL])
    (call,) = first.message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.arguments["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny."}
    messages = [*MESSAGES, first.message, result]
    second = client.chat("tiny", messages, tools=[TOOL], keep_alive="5m")
    assert (second.message.content, second.done_reason) == ("Done.", "stop")
    assert (second.eval_count, second.prompt_eval_count > 0) == (6, True)
    parts = list(client.chat("tiny", messages, tools=[TOOL], stream=True))
    assert "".join(one.message.content for one in parts) == "Done."
    assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
    made = client.chat("tiny", MESSAGES, format=CITY, options={"num_ctx": 4096, "seed": 1})
    assert json.loads(made.message.content)["city"] in ("Rome", "Oslo")


def test_prompts_are_continued(client, calling):
    assert client.generate("tiny", "Hello", system="Be short.").response == "Done."
    options = {"num_predict": 4, "repeat_penalty": 1.1, "repeat_last_n": 8}
    raw = client.generate("tiny", "<tell>", raw=True, options=options)
    assert (raw.response, raw.done_reason, raw.eval_count) == ("Done", "length", 4)
    assert client.generate("tiny", "").done_reason == "load"
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"


def test_many_results_are_read_in_no_time():
    """Each is that of the oldest call that it fits."""
    calls = [{"function": {"name": name}, "id": f"{name}{i}"} for i in range(5000) for name in "ab"]
    results = [{"role": "tool", "tool_name": name} for _ in range(8000) for name in ("b", "c", "a")]
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    start = time.monotonic()
    request, _ = read_chat({"messages": messages}, DEFAULTS)
    assert time.monotonic() - start < 5
    found = [one["tool_call_id"] for one in request.messages[1:]]
    assert found[:5] == ["b0", "a0", "a1", "b1", "a2"]


def test_a_model_that_is_not_to_stay_goes_after_its_text(calling):
    def generate(**fields: Any) -> Any:
        body = {"prompt": "Hello", "stream": False, **fields}
        return calling.send("/api/generate", body)[1]["response"]

    def loaded() -> Any:
        return calling.send("/api/ps")[1]["models"]

    assert generate(keep_alive=0) == "Done."
    wait_until(lambda: not loaded())
    assert generate() == "Done."
    time.sleep(1.5)  # longer than the pause between two searches for idle models
    assert loaded()[0]["expires_at"].startswith("9999"), "this request has not asked for that"


def test_models_are_listed(client, calling):
    client.generate("tiny", "", keep_alive="9m60s")
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert (listed.model, loaded.name, loaded.digest) == ("tiny", "tiny", listed.digest)
    assert len(listed.digest) == 64  # its client cuts it
    assert (listed.details.family, listed.details.quantization_level) == ("llama", "F32")
    assert loaded.size == loaded.size_vram == listed.size > 0
    client.generate("tiny", "", keep_alive=-1)
    assert client.ps().models[0].expires_at.year == 9999
    stays = loaded.expires_at - datetime.now(UTC)
    assert timedelta(minutes=9) < stays <= timedelta(minutes=10)
    assert loaded.context_length == calling.engine.target.context_length
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["general.architecture"] == shown.details.family
    assert shown.modelinfo["llama.context_length"] == calling.engine.target.context_length
    assert calling.send("/api/version")[1]["version"]
    client.generate("tiny", "", keep_alive=0)
    assert client.ps().models == []


@pytest.mark.parametrize("is_streamed", [True, False])
def test_durations_add_up(client, is_streamed):
    """Its documentation divides the tokens of an answer by their time."""
    made = client.chat("tiny", MESSAGES, stream=is_streamed)
    last = list(made)[-1] if is_streamed else made
    parts = last.load_duration, last.prompt_eval_duration, last.eval_duration
    assert min(parts) > 0
    assert last.total_duration == sum(parts)
    assert last.eval_count / last.eval_duration * 1e9 > 0


def test_log_probabilities(client):
    whole = client.generate("tiny", "Hello", logprobs=True, top_logprobs=2)
    parts = list(client.generate("tiny", "Hello", logprobs=True, top_logprobs=2, stream=True))
    assert "".join(one.token for one in whole.logprobs) == "Done."
    assert [one for part in parts for one in part.logprobs or ()] == whole.logprobs
    assert whole.logprobs[0].logprob == whole.logprobs[0].top_logprobs[0].logprob <= 0
    assert len(whole.logprobs[0].top_logprobs) == 2
    assert client.chat("tiny", MESSAGES, logprobs=True).logprobs[0].token == "D"
    assert client.chat("tiny", MESSAGES).logprobs is None


def test_numbers_that_stand_for_none(client):
    """A length of 0 or less is no limit, as in the client's own server."""
    for options in (
        {"num_predict": 0},
        {"num_predict": -2, "seed": -1},
        {"repeat_last_n": 0, "repeat_penalty": 9},
        {"repeat_last_n": -1, "repeat_penalty": 1},
    ):
        made = client.generate("tiny", "Hello", options=options)
        assert (made.response, made.done_reason) == ("Done.", "stop")


COLD = {"temperature": 0}
ALL_OPTIONS = {
    **{"num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0},
    **{"typical_p": 0.7, "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2},
    **{"presence_penalty": 1.5, "frequency_penalty": 1.0, "mirostat": 1, "mirostat_tau": 0.8},
    **{"mirostat_eta": 0.6, "penalize_newline": True, "stop": ["\n", "user:"], "numa": False},
    **{"num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "low_vram": False},
    **{"vocab_only": False, "use_mmap": True, "use_mlock": False, "num_thread": 8},
}
# Bodies of its documentation's curl lines, of some kinds one.
DOCUMENTED: list[tuple[str, dict[str, Any]]] = [
    ("generate", {"prompt": "Why is the sky blue?"}),
    ("generate", {"prompt": "Respond using JSON", "format": CITY, "stream": False}),
    ("generate", {"prompt": "Respond using JSON", "format": "json", "stream": False}),
    # This model does not end a text without the template.
    ("generate", {"prompt": "Why?", "raw": True, "stream": False, "options": {"num_predict": 9}}),
    ("generate", {"prompt": "Why is the sky blue?", "stream": False, "options": ALL_OPTIONS}),
    ("generate", {}),
    ("generate", {"keep_alive": 0}),
    ("chat", {"messages": MESSAGES}),
    ("chat", {"messages": MESSAGES, "stream": False, "format": CITY, "options": COLD}),
    ("chat", {"messages": [*MESSAGES, {"role": "assistant", "content": "Sunny."}, *MESSAGES]}),
    ("chat", {"messages": MESSAGES, "stream": False, "tools": [TOOL]}),
    ("chat", {"messages": []}),
    ("chat", {"messages": [], "keep_alive": 0}),
    ("show", {}),
]


@pytest.mark.parametrize(("name", "body"), DOCUMENTED)
def test_the_lines_of_its_documentation(calling, name, body):
    """As curl sends them: with the type of a form, and the name of another model."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, reply = calling.send(f"/api/{name}", {"model": "llama3.2", **body}, **form)
    assert status == 200
    if name != "show":
        last = json.loads(reply.splitlines()[-1]) if isinstance(reply, str) else reply
        assert (last["done"], last["model"]) == (True, "tiny")


def test_what_is_not_supported_says_so(calling, client):
    import ollama

    for method, *arguments in ("pull", "x"), ("embed", "x", "y"), ("delete", "x"):
        with pytest.raises(ollama.ResponseError, match=r"Not Found: .* /api/chat") as caught:
            getattr(client, method)(*arguments)
        assert caught.value.status_code == 404


IMAGE = {"role": "user", "content": "", "images": ["aGk="]}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("colour is not supported", {"colour": "red"}),
    ("options.colour is not supported", {"options": {"colour": "red"}}),
    ("options.num_predict must be", {"options": {"num_predict": "long"}}),
    ("options.repeat_penalty must be", {"options": {"repeat_penalty": 11}}),
    ("top_logprobs needs logprobs", {"top_logprobs": 3}),
    ("messages[0].images must be", {"messages": [IMAGE]}),
    ("format must be", {"format": "yaml"}),
    ("format: grammar cannot be used", {"format": {"type": "nothing"}}),
    ("keep_alive must be", {"keep_alive": "soon"}),
    ("keep_alive must be", {"keep_alive": ""}),
    ("think must be", {"think": "hard"}),
]


@pytest.mark.parametrize(("message", "fields"), BAD)
def test_errors_have_its_shape(calling, message, fields):
    status, reply = calling.send("/api/chat", {"model": "tiny", "messages": MESSAGES, **fields})
    assert (status, list(reply)) == (400, ["error"])
    assert message in reply["error"]

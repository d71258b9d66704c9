"""The server on two ranks: one listens, and its answers are those of one process."""

import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter import Engine, load
from mlx_redrafter.bench.lab.ranks import Ranks, started
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.machines.line import LOST
from tests.machines.test_launch import store_tiny

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.timeout(600)  # ranks have a limit of their own

PROMPTS = ["Once upon a time", "The king", "She ran and ran and ran", "In the old house"]


def _ask(port: int, path: str, limit: int = -1, **body: Any) -> str:
    """Send a request; with a body it is a POST. Read an answer, or its begin, and hang up."""
    headers = {"Content-Type": "application/json"} if body else {}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=240)) as client:
        client.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = client.getresponse()
        return (response.read() if limit < 0 else response.read(limit)).decode()


def _store_adapter(folder: Path, model: Any) -> Path:
    """Write random adapters of some layers, as mlx-lm stores them."""
    config = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 8.0, "dropout": 0.0}}
    linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"])
    mx.random.seed(2)
    weights = {
        name: mx.random.normal(array.shape, scale=0.1)
        for name, array in named_parameters(model).items()
        if name.endswith(("lora_a", "lora_b"))
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_tiny(tmp_path_factory.mktemp("tiny"))


@contextmanager
def _served(folder: Path, *options: str) -> Iterator[tuple[Ranks, int]]:
    """Two ranks that serve a model, and rank 0's port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as one:
        port = one.getsockname()[1]
    command = ["-m", "mlx_redrafter", "serve", "--model", str(folder), "--port", str(port)]
    command += options
    with started(command, 2) as ranks:
        ranks.wait_for("serving")
        yield ranks, port


def test_a_lost_rank_ends_the_server_with_an_answer(folder):
    with _served(folder) as (ranks, port), ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPTS[0], "max_tokens": 3000, "temperature": 1}
        body["logit_bias"] = {"2": -100}
        answer = pool.submit(_ask, port, "/v1/completions", **body)
        while "running_requests 1" not in _ask(port, "/metrics"):
            time.sleep(0.05)
        ranks.processes[1].kill()
        ended = ranks.wait()
        error = json.loads(answer.result())["error"]
    assert [one.code for one in ended] == [LOST, -9], ended
    assert error["code"] == "machine_lost"
    assert error["message"].startswith("rank 1 (")
    assert f"redrafter-mlx: {error['message']}" in ended[0].out


def test_answers_of_two_ranks_with_an_adapter(folder, tmp_path):
    bare = Engine(*load(folder)[:2], None)
    adapter = _store_adapter(tmp_path / "adapter", load(folder)[0])
    engine = Engine(*load(folder, adapter_path=adapter)[:2], None)
    options: dict[str, Any] = {"max_tokens": 24, "temp": 0.7, "seed": 5}
    expected = [engine.generate(prompt, **options) for prompt in PROMPTS]
    assert bare.generate(PROMPTS[0], **options) != expected[0]
    longer = [f"{prompt}{text}" for prompt, text in zip(PROMPTS, expected, strict=True)]
    expected_then = [engine.generate(prompt, **options) for prompt in longer]
    with _served(folder, "--adapter-path", str(adapter)) as (ranks, port):

        def complete(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.7, "seed": 5}
            answer = json.loads(_ask(port, "/v1/completions", **body))
            return str(answer["choices"][0]["text"])

        with ThreadPoolExecutor(4) as pool:
            long = {"prompt": PROMPTS[1], "max_tokens": 400, "stream": True}
            pool.submit(_ask, port, "/v1/completions", 20, **long)
            found = list(pool.map(complete, PROMPTS))
            assert found == expected
            assert list(pool.map(complete, longer)) == expected_then
        (hits,) = re.findall(r"prefix_hits_total (\d+)", _ask(port, "/metrics"))
        assert int(hits) >= len(longer)
        scored = {"prompt": PROMPTS[0], "max_tokens": 1, "echo": True, "logprobs": 1}
        answer = json.loads(_ask(port, "/v1/completions", **scored))
        assert answer["choices"][0]["text"].startswith(PROMPTS[0])
        ranks.processes[0].send_signal(signal.SIGTERM)
        ended = ranks.wait()
    assert [one.code for one in ended] == [0, 0], ended
    assert "prompts are kept in memory only" in ended[0].out
    assert ended[1].out == ""

"""Several models: loaded at their first request, unloaded if others need the memory."""

import asyncio
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from mlx_redrafter.cli.serve import ServedModels, _name_models
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.models import Model, Models
from tests.helpers.calls import at_call
from tests.helpers.models import chat_tokenizer, random_drafter, tiny_llama
from tests.server.serving import DEFAULTS, PATH, Served, hold, make_engine, serving, wait_until

BODY: dict[str, Any] = {"prompt": "THE OLD MAN", "max_tokens": 12}


def _other(seed: int) -> Engine:
    return Engine(tiny_llama(seed=seed), chat_tokenizer(), "lookup")


def _models(*names: str) -> list[Model]:
    missing = Mock(side_effect=CheckpointError("no such folder: /secret"))
    loads = {"second": lambda: _other(7), "third": lambda: _other(8), "missing": missing}
    return [Model(name, loads[name]) for name in names]


def _states(served: Served) -> dict[str, str]:
    return {one["id"]: one["state"] for one in served.send("/v1/models")[1]["data"]}


def test_models_take_turns():
    with serving(make_engine(), others=_models("second", "third")) as served:
        assert set(_states(served).values()) == {"not_loaded"}
        names = ("tiny", "second", "third")
        expected = {name: served.text(**BODY, model=name) for name in names}
        assert len(set(expected.values())) == 3
        assert set(_states(served).values()) == {"loaded"}
        shown = served.send("/v1/models/second")[1]
        assert shown["tokens_per_step"] >= 1
        sizes = [model.loaded.nbytes for model in served.models]
    limits = Limits(max_model_bytes=max(sizes))
    with serving(make_engine(), limits, others=_models("second", "third")) as served:

        def ask(name: str) -> list[str]:
            return [served.text(**BODY, model=name) for _ in range(2)]

        with ThreadPoolExecutor(3) as clients:
            assert list(clients.map(ask, expected)) == [[one] * 2 for one in expected.values()]
        assert list(_states(served).values()).count("loaded") == 1


def test_a_model_that_cannot_be_loaded(caplog):
    with serving(make_engine(), others=_models("missing")) as served:
        status, reply = served.send(PATH, {**BODY, "model": "missing"})
        assert (status, reply["error"]["code"]) == (503, "model_not_loaded")
        assert "secret" not in reply["error"]["message"]
        assert "no such folder: /secret" in caplog.text
        assert served.text(**BODY)


def test_the_drafter_in_use_is_named():
    """A drafter that was asked for and could not be loaded is not."""
    model, tokenizer = tiny_llama(seed=4), chat_tokenizer()
    drafters = {"none": None, "lookup": "lookup", "it": random_drafter(64, 32)}
    for expected, proposer in drafters.items():
        load = partial(Engine, model, tokenizer, proposer)
        one = Model("one", load, name_drafter=lambda: "it")
        assert one.describe()["drafter"] is None
        Models([one], DEFAULTS, Limits()).load(one)
        assert one.describe()["drafter"] == expected


def test_idle_models_are_unloaded():
    with serving(make_engine(), Limits(keep_alive=0.2)) as served:
        first = served.text(**BODY)
        wait_until(lambda: _states(served)["tiny"] != "loaded")
        assert served.text(**BODY) == first


def test_a_model_whose_request_is_prepared_keeps_its_memory(monkeypatch):
    """No other one is loaded beside it, though the worker does not know the request yet."""
    begun, goes_on = hold(monkeypatch, lambda request: request.model == "tiny")
    others = _models("second")
    with serving(make_engine(), Limits(max_model_bytes=1), others=others) as served:
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(served.text, **BODY, model="tiny")
            assert begun.wait(60)
            second = clients.submit(served.text, **BODY, model="second")
            time.sleep(0.5)
            assert others[0].loaded is None
            goes_on.set()
            assert first.result() != second.result()


def test_a_model_that_is_unloaded_at_once_serves_its_request(monkeypatch):
    (model,) = _models("second")
    models = Models([model], DEFAULTS, Limits())
    forget = threading.Timer(0.05, setattr, (model, "loaded", None))
    at_call(monkeypatch, model, "load", forget.start)
    monkeypatch.setattr(models, "_make_room", lambda _: asyncio.sleep(0.3))
    assert asyncio.run(models.open("second"))[1].engine is not None


def test_a_model_that_a_client_unloads_amid_a_text_is_not_loaded_twice(monkeypatch):
    others = _models("second")
    loads, end = [], {"model": "second", "keep_alive": 0}
    at_call(monkeypatch, others[0], "load", lambda: loads.append(1))
    with serving(make_engine(), others=others) as served:
        served.slow_down(monkeypatch, 0.01)
        with closing(served.begin(model="second")) as connection:
            connection.getresponse()
            assert served.send("/api/generate", end)[1]["done_reason"] == "unload"
            assert served.text(**BODY, model="second")
            assert len(loads) == 1
        wait_until(lambda: _states(served)["second"] != "loaded")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_unloaded_model_leaves_the_memory(streams):
    """Also the first one in use, and while its last client keeps the connection."""
    made: list[Any] = []

    def load() -> Engine:
        engine = _other(7)
        made.append(weakref.ref(engine.target.model))
        return engine

    with serving(make_engine(), others=[Model("second", load)]) as served:
        with closing(served.begin(**BODY, model="second", stream=streams)) as connection:
            assert connection.getresponse().read()
            end = {"model": "second", "keep_alive": 0}
            wait_until(lambda: served.send("/api/generate", end) and made[0]() is None)


def test_folders_and_names(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    pairs = ServedModels([str(tmp_path), "org/other"], ["lookup"]).pairs()
    assert [model.name for model in _name_models(pairs, None)] == ["one", "two", "org/other"]
    assert {pair.drafter for pair in pairs} == {"lookup"}
    with pytest.raises(ConfigError, match="found none"):
        ServedModels([str(tmp_path / "empty")]).pairs()
    with pytest.raises(ConfigError, match="once for each of the 2 models"):
        ServedModels([str(tmp_path)], ["lookup"] * 3).pairs()
    with pytest.raises(ConfigError, match="names of their own"):
        _name_models(ServedModels([str(tmp_path / "one"), str(tmp_path)]).pairs(), None)
    with pytest.raises(ConfigError, match="single model"):
        _name_models(pairs, "name")


def test_an_entry_names_the_defaults_and_the_context():
    """Clients that show them, such as the chat page, need not know the command line."""
    defaults = GenerationOptions(max_tokens=7, temp=0.5, top_k=3)
    with serving(make_engine(), Limits(max_context=100), defaults) as served:
        served.text(**BODY)
        (entry,) = served.send("/v1/models")[1]["data"]
        assert entry["defaults"] == {"temperature": 0.5, "top_k": 3, "max_tokens": 7}
        expected = {"context_length": 100, "has_chat": True, "has_tools": False}
        assert entry == {**entry, **expected}
        for name in ("tiny", "tiny:latest"):  # Ollama's tag names the same model
            assert served.send(f"/v1/models/{name}")[1] == entry


def test_cancelled_texts_do_not_lower_the_tokens_per_step(monkeypatch):
    limits = Limits(max_running=1)
    with serving(make_engine(), limits) as served:
        served.slow_down(monkeypatch, 0.01)
        for _ in range(5):
            with closing(served.begin()) as connection:
                response = connection.getresponse()
                for _ in range(12):
                    response.readline()
            served.wait_until_idle()
        entry = served.send("/v1/models/tiny")[1]
    assert served.worker.counters.texts["cancelled"] == 5
    assert entry["tokens_per_step"] >= 1

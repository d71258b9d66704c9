"""The log of requests: one line for each, whatever became of it."""

import logging
import re
from contextlib import closing

import pytest

from tests.server.serving import KEY, PATH, wait_until


def _lines(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """The log's first lines; the client may have its answer before the line is there."""
    wait_until(lambda: len(caplog.messages) >= count)
    return caplog.messages


def test_a_text_has_tokens_and_a_speed(served, caplog):
    caplog.set_level(logging.INFO, "mlx_redrafter.server.replies")
    served.text(prompt="AB", max_tokens=1)  # loads the model
    _lines(caplog, 1)
    for stream in True, False:
        caplog.clear()
        served.send(PATH, {"prompt": "ABC", "max_tokens": 20, "stream": stream})
        (line,) = _lines(caplog, 1)
        found = re.fullmatch(
            rf"POST {PATH} 200, 3 prompt tokens(?: \(2 kept\))? in [\d.]+ s, "
            r"20 tokens in ([\d.]+) s, ([\d.]+) tokens/s",
            line,
        )
        assert found is not None, line
        # The speed can be divided from the two numbers next to it, which are rounded.
        seconds, speed = map(float, found.groups())
        assert abs(20 / speed - seconds) < 0.01


def test_other_requests_have_their_time(served, caplog):
    caplog.set_level(logging.INFO, "mlx_redrafter")
    served.send("/health")
    served.send("/metrics")
    served.send("/v1/models")
    served.send("/v1/%0Anothing")
    served.send(PATH, {"prompt": "A"}, key="no")
    patterns = r"GET /v1/models 200", r"GET /v1/%0Anothing 404", rf"POST {PATH} 401"
    for pattern, line in zip(patterns, _lines(caplog, 3), strict=True):
        assert re.fullmatch(rf"{pattern}, [\d.]+ s", line), line
    assert KEY not in caplog.text


def test_a_lost_clients_text_is_cut(served, caplog):
    caplog.set_level(logging.INFO, "mlx_redrafter")
    with closing(served.begin()) as connection:
        connection.getresponse().readline()
    served.wait_until_idle()
    wait_until(lambda: _lines(caplog, 1)[-1].endswith(", cut"))
    assert "drafts, found" not in caplog.text

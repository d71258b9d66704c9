"""`bench speed` and `bench share`: settings, servers beside this process, and pages."""

import getpass
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter import load
from mlx_redrafter.bench.openai_server import OpenAiServer, find_server
from mlx_redrafter.bench.report import page
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import DataError, RedrafterError, ResourceError
from tests.helpers.fake_hub import serving_http
from tests.server.serving import KEY, serving


def test_a_process_and_a_server_in_all_settings(folders, tasks, tmp_path, bench, no_timing):
    """Every text of the default and of the server is plain decoding's, and what is published."""
    target, drafter = folders
    out, page = tmp_path / "mine" / "speed.json", tmp_path / "page.md"
    options = (
        "--model", target, "--drafter", drafter, "--prompts", tasks, "-m", 6, "-o", out,
        "--repeats", 1, "--contexts", "60", "--batch-sizes", "1,3",
    )  # fmt: skip
    with serving(Engine(*load(str(target), drafter=str(drafter)))) as served:
        beside = ("--server", f"ours={served.url}", "--api-key", KEY)
        text = bench("speed", *options, *beside).out
        before = out.read_text()
        bench("speed", *options, *beside, "--resume")
    result = json.loads(out.read_text())
    assert result["runs"] == json.loads(before)["runs"]
    rows = [row for row in result["rows"] if not row["category"]]
    assert len({row["setting"] for row in rows}) == 4
    assert {row["arm"] for row in rows} == {"plain", "auto", "ours (server)"}
    assert [row["num_different"] for row in rows] == [0] * len(rows)
    assert all(row["tokens_per_step"] >= 1 for row in rows)
    assert {one["prompt_tokens"] for one in result["runs"]} == {60}
    assert {row["category"] for row in result["rows"]} == {"", "coding", "qa"}
    assert KEY not in out.read_text()
    assert "ours (server)" in text
    assert "| qa |" in out.with_suffix(".md").read_text()
    if out.with_suffix(".png").exists():
        assert out.with_suffix(".png").stat().st_size > 10_000

    result["configuration"]["model"] = f"{Path.home()}/models/big"
    out.write_text(json.dumps(result))
    bench("share", out, "-o", page)
    written = page.read_text()
    assert written.startswith("# big on ")
    for private in (str(tmp_path), str(Path.home()), served.url, f"/{getpass.getuser()}/"):
        assert private not in written
    for line in out.with_suffix(".md").read_text().splitlines():
        assert line in written


def test_a_result_that_cannot_be_shared(tmp_path, bench):
    out = tmp_path / "r.json"
    out.write_text('{"kind": "speed", "machine": {}}')
    assert "expected" in bench("share", out, "-o", tmp_path / "page.md").err
    assert not (tmp_path / "page.md").exists()


def test_a_page_of_a_machine_without_a_home(monkeypatch):
    machine = dict.fromkeys(("processor", "cores", "system", "device"), "x") | {
        "memory_bytes": None
    }
    settings = {"model": "a/b", "drafter": "c", "prompt_file": "p.jsonl", "prompts": [1]}
    settings |= {"servers": [], "repeats": 1, "max_tokens": 2}
    facts = {"versions": {}, "commit": None, "measured_at": "2026", "disturbances": []}
    facts |= {"sittings": [{"load_of_others": None}]}
    result = {"machine": machine, "configuration": settings, **facts, "tables": ["| table |"]}
    monkeypatch.setenv("HOME", "/")
    assert "a/b" in page(result)
    assert "| idle machine | unknown, as the runs were too short to tell |" in page(result)
    facts["sittings"][:] = [{"load_of_others": 0.1}, {}]
    assert "| idle machine | yes |" in page(result)
    monkeypatch.setenv("HOME", "/a/b")
    settings["prompt_file"] = "x/a/b/p.jsonl"
    with pytest.raises(DataError, match="your home folder"):
        page(result)


def test_settings_that_cannot_be(folders, tasks, bench):
    out = tasks.with_name("out.json")
    options = ("--model", folders[0], "--prompts", tasks, "--batch-sizes", 5, "--out", out)
    with _answering(b'{"data": [{"id": "m"}]}') as url:
        twice = bench("speed", *options, "--server", f"a={url}", "--server", f"a={url}")
    assert "a different name for every --server" in twice.err
    few = bench("speed", *options).err
    assert "expected at least 5 prompts for a batch of 5, got 4" in few
    long = bench("speed", *options[:4], "--contexts", "4k").err
    assert "give a file with more or longer prompts" in long
    assert not out.exists()  # which the next call would have to resume


@contextmanager
def _answering(body: bytes, status: int = 200) -> Iterator[str]:
    """Serve the same bytes for every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with serving_http(Handler) as address:
        yield f"{address}/v1"


def _stream(*events: Any) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([": waiting\n\n", *lines, "data: [DONE]\n\n"]).encode()


PIECE = {"choices": [{"delta": {"content": "ab"}}]}


@pytest.mark.parametrize(
    ("last", "steps"),
    [
        ({"choices": [], "timings": {"predicted_n": 9, "draft_n": 8, "draft_n_accepted": 5}}, 3),
        ({"choices": [], "x_mlx_dspark": {"target_forwards": 3, "accept_len": 2.5}}, 2),
        ({"choices": [{"delta": {}, "steps": 6}]}, 6),
        ({"choices": []}, None),
    ],
)
def test_steps_as_servers_report_them(last, steps):
    thought = {"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]}
    with _answering(_stream(thought, PIECE, last)) as url:
        (found,) = OpenAiServer("x", url, "m").write(["hi"], True, 9, 0.0, 0)
    assert (found.text, found.steps) == ("hmab", steps)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"error": {"message": "no such model"}}', 404, "status 404: no such model"),
        (b"<html>", 500, "status 500: <html>"),
        (_stream({"error": {"message": "out of memory"}}), 200, "out of memory"),
        (b'data: {"choices": []}\n\n', 200, r"without \[DONE\]"),
        (b"data: {\n\n", 200, "expected JSON"),
        (b"data: [1]\n\n", 200, "expected an object"),
    ],
)
def test_servers_that_fail(body, status, error):
    with _answering(body, status) as url, pytest.raises(RedrafterError, match=error):
        OpenAiServer("x", url, "m").write(["hi"], True, 9, 0.0, 0)


def test_finding_a_server():
    for address in ("http://x", "a=ftp://x", "=http://x"):
        with pytest.raises(DataError, match="expected a server such as"):
            find_server(address)
    with pytest.raises(ResourceError, match="is the server running"):
        find_server("a=http://127.0.0.1:9/v1")
    models = json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode()
    with _answering(models) as url:
        with pytest.raises(DataError, match=r"has 2 models \(one, two\); add #MODEL"):
            find_server(f"a={url}")
        assert find_server(f"a={url}/#two").model == "two"


KEYS = st.sampled_from(["choices", "delta", "content", "text", "timings", "steps", "error"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(JSON, max_size=3))
def test_no_reply_breaks_the_reader(events):
    """Whatever a server sends is a text or an error of this package."""
    lines = _stream(*events).splitlines(keepends=True)
    with patch("mlx_redrafter.bench.openai_server._open", return_value=iter(lines)):
        try:
            (found,) = OpenAiServer("x", "http://x", "m").write(["hi"], True, 9, 0.0, 0)
        except RedrafterError:
            return
    assert isinstance(found.text, str)

"""A Hugging Face Hub on this machine, with the repositories of a test."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

# The one commit of every repository.
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Size of the pieces in which a file is sent, in bytes.
PIECE = 2**20


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests on a free port; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class FakeHub:
    """Repositories by name, each a folder; ``fetched`` are files as ``org/name/file``."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.fetched: list[str] = []
        self.address = ""
        self.pause = 0.0  # seconds between two pieces of a file

    def add(self, name: str, folder: Path, **card: Any) -> None:
        self.folders[name], self.cards[name] = folder, card

    @contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        """Answer requests on a free port."""
        with serving_http(_handler(self)) as self.address:
            yield self

    def info(self, name: str) -> dict[str, Any]:
        """Describe a repository, as ``/api/models/NAME`` does."""
        files = [
            {"rfilename": path.name, "size": path.stat().st_size}
            for path in sorted(self.folders[name].iterdir())
        ]
        card = self.cards[name]
        facts = {key: value for key, value in card.items() if key != "gated"}
        return {
            "id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [],
            "gated": card.get("gated", False), "downloads": 0, "siblings": files, "cardData": facts,
        }  # fmt: skip

    def tree(self, name: str) -> list[dict[str, Any]]:
        """List the files of a repository."""
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}
            for path in sorted(self.folders[name].iterdir())
        ]


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == "/api/models":
                self._send_json([hub.info(name) for name in hub.folders])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
                self._describe(match[1], hub.info)
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
                self._describe(match[1], hub.tree)
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self._send_file(match[1], match[2])
            else:
                self._send(404)

        do_HEAD = do_GET

        def _describe(self, name: str, describe: Callable[[str], object]) -> None:
            if name in hub.folders:
                self._send_json(describe(name))
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _send_json(self, values: object) -> None:
            self._send(200, json.dumps(values).encode(), {"Content-Type": "application/json"})

        def _send_file(self, name: str, file: str) -> None:
            path = hub.folders.get(name, Path("/nowhere")) / file
            if hub.cards.get(name, {}).get("gated"):
                self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            elif not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                if self.command == "GET":
                    hub.fetched.append(f"{name}/{file}")
                headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
                self._send(200, path.read_bytes(), headers)

        def _send(
            self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            with suppress(ConnectionError):  # the client has ended
                for begin in range(0, len(content), PIECE):
                    time.sleep(hub.pause if begin else 0)
                    self.wfile.write(content[begin : begin + PIECE])

    return Handler

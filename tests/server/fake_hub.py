"""A hub on loopback: the few routes that huggingface_hub calls, serving folders of this machine.

`with FakeHub({"org/name": folder}) as hub`: put `hub.url` into HF_ENDPOINT. `asked` has (method, path) of every
request. Repositories in `private` answer as the hub answers strangers; those in `gated` list their files but send none.
`cut` maps a file to the bytes sent before the connection breaks, for the first requests of that file.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_open_sesame"


class FakeHub:
    """A hub whose threads answer until the `with` block ends."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.broken: dict[str, int] = {}  # like `cut`, but for every request
        self.down = False
        self.hold: set[str] = set()  # files whose bytes never come
        self.held = threading.Event()  # set when a file of `hold` is requested
        self.cut: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []
        self.sent = 0  # bytes of files, in total
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client has gone
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str) -> str:
        """A commit id that changes with the files."""
        return hashlib.sha1(json.dumps(sorted(self.files(name).items())).encode()).hexdigest()

    def files(self, name: str) -> dict[str, int]:
        root = self.repositories[name]
        return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}

    def fetched(self) -> list[str]:
        """Files whose bytes were requested, in order."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for kind, path in self.asked
            if kind == "GET" and "/resolve/" in path
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path))
        found = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?|/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path
        )
        if self.down or found is None:
            refuse(request, 503 if self.down else 404, "" if self.down else "EntryNotFound")
            return
        name, kind, revision, file = found[1] or found[4], found[2] or found[5], found[3] or found[6], found[7]
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            refuse(request, 401, "", "Invalid credentials in Authorization header")
        elif name not in self.repositories or (name in self.private and token != TOKEN):
            refuse(request, 401, "RepoNotFound")
        elif revision not in (None, "main", "v1", self.commit(name)):
            refuse(request, 404, "RevisionNotFound")
        elif kind == "resolve" and name in self.gated and token != TOKEN:
            refuse(request, 403, "GatedRepo")
        elif kind == "resolve":
            self.send_file(request, name, file)
        elif kind == "tree":
            files = [
                {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(path.encode()).hexdigest()}
                for path, size in self.files(name).items()
            ]
            send(request, json.dumps(files).encode())
        else:
            files = [{"rfilename": path, "size": size} for path, size in self.files(name).items()]
            said = {"id": name, "sha": self.commit(name), "private": False, "siblings": files}
            send(request, json.dumps(said).encode())

    def send_file(self, request: BaseHTTPRequestHandler, name: str, file: str) -> None:
        path = self.repositories[name] / file
        if not path.is_file():
            refuse(request, 404, "EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.commit(name)}
        status, begin, end = 200, 0, len(content)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            status, begin, end = 206, int(asked[1]), min(int(asked[2] or end) + 1, end)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        if file in self.hold and request.command == "GET":
            self.held.set()
            threading.Event().wait(60)
        cut = self.cut.pop(file, self.broken.get(file)) if request.command == "GET" else None
        self.sent += len(content[begin:end][:cut]) * (request.command == "GET")
        send(request, content[begin:end], status, headers, cut)


def send(
    request: BaseHTTPRequestHandler,
    body: bytes,
    status: int = 200,
    headers: dict[str, str] | None = None,
    cut: int | None = None,
) -> None:
    request.send_response(status)
    for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut])
        if cut is not None:
            request.wfile.flush()
            request.close_connection = True


def refuse(request: BaseHTTPRequestHandler, status: int, code: str, message: str = "") -> None:
    headers = {"X-Error-Code": code} if code else {}
    send(request, b"{}", status, {**headers, **({"X-Error-Message": message} if message else {})})


def asked_in_place_of_the_real(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Makes huggingface_hub use `hub`, without a token, and `cache` as its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    urls = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

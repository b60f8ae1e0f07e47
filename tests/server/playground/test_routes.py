"""/, the page's files and /about: policy, caching, keys, the flag; no file of the page names another host."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from types import SimpleNamespace

import pytest

from server.routes.playground import FOLDER, TYPES, facts, pages, task_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html", ".svg"))
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
# A namespace is a name, not an address; the examples of forms are text only.
VENDOR = FOLDER / "vendor"
KATEX = "vendor/katex-0.19.1"
ADDRESS = re.compile(r"https?://(?!www\.w3\.org/2000/svg)\w")


async def test_the_page_has_a_strict_policy_and_is_asked_for_each_time(client):
    reply = await client.get("/", headers=BROWSER)
    assert reply.reply_headers["vary"] == "accept"
    assert reply.reply_headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.reply_headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "require-trusted-types-for 'script'",
                 "frame-ancestors 'none'"):  # fmt: skip
        assert rule in policy.split("; ")
    assert "unsafe" not in policy
    assert reply.reply_headers["cache-control"] == "no-cache"
    again = await client.get("/", headers={**BROWSER, "if-none-match": reply.reply_headers["etag"]})
    assert (again.status, again.content) == (304, b"")


async def test_every_file_that_the_page_names_is_served_and_cacheable_for_a_year(client):
    html = (await client.get("/", headers=BROWSER)).content.decode()
    named = re.findall(r'(?:src|href)="(playground/[^"]+)"', html)
    assert {name.rpartition(".")[2] for name in named} == {"js", "css", "svg"}
    folder = f"/playground/{pages().digest}"
    modules = {name for path in SOURCES for name in re.findall(r'from "\./([\w./-]+)"', path.read_text())}
    fonts = re.findall(r"url\(([\w/.-]+\.woff2)\)", pages().files[f"{KATEX}/katex.min.css"].decode())
    vendored = [f"{KATEX}/{name}" for name in ("katex.min.js", "katex.min.css", *fonts)]
    assert len(fonts) == 20
    for path in ("/" + name for name in (*named, *(f"{folder[1:]}/{name}" for name in (*modules, *vendored)))):
        reply = await client.get(path)
        assert reply.status == 200, path
        assert "immutable" in reply.reply_headers["cache-control"]
        assert reply.reply_headers["x-content-type-options"] == "nosniff"
        assert path.startswith(folder)
        if path.endswith(".woff2"):
            assert reply.reply_headers["content-type"] == "font/woff2"
    absent = ("absent.js", "index.html", "..%2f..%2fapp.py", "vendor/VENDORED.md", "vendor/../../app.py", "vendor")
    for path in ("/playground/0/main.js", *(f"{folder}/{name}" for name in absent)):
        assert (await client.get(path)).status == 404


async def test_s02_page_and_files_need_no_key_and_facts_do(serve):
    client = serve(server={"api_key": ("right",)})
    for path in ("/", f"/playground/{pages().digest}/main.js"):
        assert (await client.get(path)).status == 200
    assert (await client.get("/about")).status == 401
    assert (await client.call("GET", "/about", headers={"x-api-key": "right"}).finish()).status == 200


async def test_about_describes_the_model(client, tiny_client):
    facts = (await client.get("/about")).json()
    assert set(facts["modalities"]) == {"text", "image", "audio", "video"}
    assert facts["embedded"] is True
    assert facts["defaults"] == {"temperature": 0.0}
    assert facts["max_model_len"] == client.state.engine.max_model_len
    assert facts["task"] == "chat"
    assert facts["page"] == pages().digest
    assert (await tiny_client.get("/about")).json()["modalities"] == ["text"]


async def test_the_task_is_what_the_model_can_do(client, monkeypatch):
    state = client.state
    assert task_of(state) == "chat"
    monkeypatch.setattr(state, "renderer", SimpleNamespace(template=None, templates={}, fill_in=None))
    assert task_of(state) == "completion"
    monkeypatch.setattr(state, "whisper", object())
    assert facts(state)["modalities"] == ["audio"]
    foreign = dataclasses.replace(state.engine.model, architecture="ForeignForCausalLM", implementation="transformers")
    monkeypatch.setattr(state.engine, "model", foreign)
    assert facts(state)["family"]
    limits = SimpleNamespace(pools=True)
    monkeypatch.setattr(state, "engine", SimpleNamespace(limits=limits))
    assert task_of(state) == "pooling"


async def test_without_the_page_the_root_has_name_and_version(serve):
    client = serve(server={"disable_playground": True, "api_key": ("right",)})
    assert (await client.get("/")).status == 401
    key = {"x-api-key": "right"}
    for kind in ("application/json", "text/html,*/*"):
        assert (await client.get("/", headers={**key, "accept": kind})).json()["name"] == "omniloop"
    assert (await client.get("/", headers=key)).content == b"Ollama is running"
    for path in ("/about", f"/playground/{pages().digest}/main.js"):
        assert (await client.get(path)).status == 401
        assert (await client.call("GET", path, headers=key).finish()).status == 404


async def test_no_file_of_the_page_is_large_or_reaches_another_server():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path.name
        assert not ADDRESS.search(text), path.name
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert banned not in text, f"{path.name}: {banned}"
    own = [path for path in FOLDER.iterdir() if path.is_file()]
    assert {path.suffix for path in own} <= {*TYPES, ".html"}
    assert sum(path.stat().st_size for path in own) < 200_000


async def test_libraries_are_the_files_that_their_list_names_each_with_its_licence():
    text = (VENDOR / "VENDORED.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", text, re.MULTILINE))
    files = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*") if path.is_file()}
    del files["VENDORED.md"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed
    folders = {name.partition("/")[0] for name in files}
    assert {f"{folder}/LICENSE" for folder in folders} <= set(files)
    for folder in folders:
        name, _, version = folder.rpartition("-")
        assert re.search(rf"^## {re.escape(name)} {re.escape(version)}$", text, re.MULTILINE | re.IGNORECASE), folder
    assert sum(path.stat().st_size for path in files.values()) < 1_000_000


async def test_libraries_travel_with_the_package():
    wanted = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in wanted["server"] for path in FOLDER.parent.glob(pattern)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= packed

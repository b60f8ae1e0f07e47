"""/openapi.json and /docs/api: made from the schema types, complete, switched off by their flag."""

from __future__ import annotations

import re

import pytest

from server.dialects.table import operations, routes_of
from server.routes import playground

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_every_route_is_described_and_nothing_else(client):
    routed = {
        (method, re.sub(r":path}", "}", line.path))
        for line in routes_of(client.state.config)
        for method in line.methods
        if method != "HEAD" or "GET" not in line.methods
    }
    assert routed == set(operations())
    document = (await client.get("/openapi.json")).json()
    told = {(method.upper(), path) for path, entry in document["paths"].items() for method in entry}
    assert told == routed


async def test_the_document_has_the_prefix_that_a_proxy_puts_before_the_paths(serve):
    for root_path, url in (("", "/"), ("/llm", "/llm")):
        document = (await serve(server={"root_path": root_path}).get("/openapi.json")).json()
        assert document["servers"] == [{"url": url}]


async def test_every_reference_resolves(client):
    reply = await client.get("/openapi.json")
    document = reply.json()
    for name in re.findall(r'"\$ref":"#/components/schemas/(\w+)"', reply.content.decode()):
        assert name in document["components"]["schemas"]
    chat = document["components"]["schemas"]["ChatBody"]
    assert "messages" in chat["required"]
    assert {"temperature", "use_beam_search", "repetition_detection"} <= set(chat["properties"])


async def test_the_page_has_the_strict_policy_and_its_files_are_served(client):
    page = await client.get("/docs/api")
    assert page.reply_headers["content-type"] == "text/html; charset=utf-8"
    assert page.reply_headers["content-security-policy"] == playground.HEADERS["content-security-policy"]
    named = re.findall(r'(?:src|href)="(api/[^"]+)"', page.content.decode())
    assert {name.rpartition(".")[2] for name in named} == {"js", "css", "svg"}
    for name in named:
        assert (await client.get(f"/docs/{name}")).status == 200
    assert (await client.get(f"/docs/{named[0].rpartition('/')[0]}/..%2fopenapi.py")).status == 404
    again = await client.get("/docs/api", headers={"if-none-match": page.reply_headers["etag"]})
    assert again.status == 304
    led = await client.get("/docs")
    assert (led.status, led.reply_headers["location"]) == (307, "docs/")


async def test_docs_can_be_switched_off(serve):
    digest = playground.pages().digest
    for path in ("/docs", "/docs/api", f"/docs/api/{digest}/reference.js", "/openapi.json"):
        assert (await serve(server={"disable_docs": True}).get(path)).status == 404
        assert (await serve(server={"disable_docs": True, "api_key": ("k",)}).get(path)).status == 401


async def test_s02_the_page_needs_no_key_and_the_description_does(serve):
    client = serve(server={"api_key": ("k",)})
    for path in ("/docs/api", f"/docs/api/{playground.pages().digest}/reference.js"):
        assert (await client.get(path)).status == 200
    assert (await client.get("/openapi.json")).status == 401
    assert (await client.get("/openapi.json", headers={"x-api-key": "k"})).status == 200

"""/openapi.json and /docs: made from the schema types, complete, switched off by their flag."""

from __future__ import annotations

import re

import pytest

from server.app import FAMILIES
from server.openapi import TABLE
from server.routes import docs, pages, playground

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_every_route_is_described_and_nothing_else(client):
    routed = {
        (method, re.sub(r":path}", "}", line.path))
        for family in (*FAMILIES, playground, docs, pages)
        for line in family.ROUTES
        for method in line.methods - {"HEAD"}
    }
    assert routed == set(TABLE)
    document = (await client.get("/openapi.json")).json()
    told = {(method.upper(), path) for path, entry in document["paths"].items() for method in entry}
    assert told == routed


async def test_what_a_proxy_puts_before_the_paths_is_told(serve):
    for root_path, url in (("", "/"), ("/llm", "/llm")):
        document = (await serve(server={"root_path": root_path}).get("/openapi.json")).json()
        assert document["servers"] == [{"url": url}]


async def test_every_reference_leads_somewhere(client):
    reply = await client.get("/openapi.json")
    document = reply.json()
    for name in re.findall(r'"\$ref":"#/components/schemas/(\w+)"', reply.content.decode()):
        assert name in document["components"]["schemas"]
    chat = document["components"]["schemas"]["ChatBody"]
    assert "messages" in chat["required"]
    assert {"temperature", "use_beam_search", "repetition_detection"} <= set(chat["properties"])


async def test_the_page_needs_no_other_server_and_no_script(client):
    reply = await client.get("/docs")
    page = reply.content.decode()
    assert reply.reply_headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/chat/completions" in page
    assert "repetition_detection" in page
    assert "<script" not in page
    assert "http" not in page


async def test_docs_can_be_switched_off_and_need_a_key_like_the_rest(serve):
    for path in ("/docs", "/openapi.json"):
        assert (await serve(server={"disable_docs": True}).get(path)).status == 404
        assert (await serve(server={"api_key": ("k",)}).get(path)).status == 401

"""/docs/ and /docs/NAME: the users' pages as HTML and as text; no URL reads other files."""

from __future__ import annotations

import re

import pytest

from server import docs

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_pages_are_served_as_html_and_as_text(client):
    listed = (await client.get("/docs/")).content.decode()
    for name in docs.NAMES:
        assert f'href="{name}"' in listed
        reply = await client.get(f"/docs/{name}")
        assert reply.status == 200
        assert reply.reply_headers["content-type"] == "text/html; charset=utf-8"
        html = reply.content.decode()
        assert "<h1>" in html
        assert "<script" not in html
        assert "&lt;!--" not in html
        assert not re.findall(r'href="\w+\.md', html)
        assert "default-src 'none'" in reply.reply_headers["content-security-policy"]
    plain = await client.get("/docs/models", headers={"accept": "text/markdown"})
    assert plain.reply_headers["content-type"] == "text/markdown; charset=utf-8"
    assert plain.content.decode() == docs.text("models")
    picture = await client.get("/docs/page.png")
    assert picture.content == (docs.FOLDER / "page.png").read_bytes()


@pytest.mark.parametrize(
    "path",
    ["/docs/../", "/docs/..", "/docs/%2e%2e/", "/docs/..%2fconfig.py", "/docs/models.md", "/docs/none", "/docs//"],
)
async def test_no_address_reaches_a_file_outside_the_folder(client, path):
    assert (await client.get(path)).status == 404


async def test_pages_go_with_the_description_and_need_a_key_like_it(serve):
    for path in ("/docs/", "/docs/models"):
        assert (await serve(server={"disable_docs": True}).get(path)).status == 404
        assert (await serve(server={"api_key": ("k",)}).get(path)).status == 401

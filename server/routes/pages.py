"""/docs/ lists the pages for users, /docs/NAME serves one of them (server/docs); off with --disable-docs.

Owner: loop; HTML is made in the pool at the first request of a page. A browser gets HTML without scripts; a client that
accepts text/markdown and no HTML gets the text. Names outside of the list are 404, so no address opens another file.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from server import __version__, docs
from server.errors import not_found
from server.http.exchange import state_of
from server.routes.endpoint import route

STYLE = """\
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }
:root { color-scheme: light dark; }
pre, code { font: 0.9rem/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: 0.75rem; border: 1px solid #8886; border-radius: 4px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { border: 1px solid #8886; padding: 0.25rem 0.5rem; text-align: left; vertical-align: top; }
img { max-width: 100%; }
p, li { overflow-wrap: anywhere; }
"""
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{DIGEST}'; img-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "vary": "accept",
}


async def index(request: Request) -> Response:
    """The list of pages."""
    return await answered(request, "")


async def page(request: Request) -> Response:
    """One page, or one of its pictures."""
    name = request.path_params["name"]
    if name in docs.PICTURES:
        data = await asyncio.get_running_loop().run_in_executor(state_of(request).pool, (docs.FOLDER / name).read_bytes)
        return Response(data, media_type="image/png", headers=HEADERS)
    if name not in docs.NAMES:
        raise not_found("there is no such page; /docs/ lists the pages")
    return await answered(request, name)


async def answered(request: Request, name: str) -> Response:
    """The page in the format that the client accepts."""
    accepted = request.headers.get("accept", "")
    plain = "text/markdown" in accepted and "text/html" not in accepted
    make = markdown if plain else document
    made = await asyncio.get_running_loop().run_in_executor(state_of(request).pool, make, name)
    return Response(made, media_type=f"text/{'markdown' if plain else 'html'}; charset=utf-8", headers=HEADERS)


@cache
def markdown(name: str) -> str:
    """The text of a page, or of the list for ""."""
    if name:
        return docs.text(name)
    return "# omniloop\n\n" + "".join(f"- [{docs.title(each)}]({each})\n" for each in docs.NAMES)


@cache
def document(name: str) -> str:
    """The whole HTML document of a page, or of the list for ""."""
    title = docs.title(name) if name else "Pages"
    if name:
        body = docs.html(name)
    else:
        lines = "".join(f'<li><a href="{each}">{docs.title(each)}</a></li>\n' for each in docs.NAMES)
        body = f"<h1>omniloop {__version__}</h1>\n<ul>\n{lines}</ul>\n"
        body += '<p><a href="api">The API</a>, also as <a href="../openapi.json">OpenAPI</a></p>\n'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} - omniloop</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f'<body><nav><a href="./">Pages</a></nav>\n<main>\n{body}</main></body></html>\n'
    )


ROUTES = [route("/docs/", index, "GET"), route("/docs/{name}", page, "GET")]

"""Pages of stored objects: the query fields `after`, `limit` and `order`, and the form of a list in OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import Request

from server.errors import invalid, quoted
from server.routes.endpoint import one_of

NUMBER = re.compile(r"[0-9]{1,9}\Z")


class Listed(Protocol):
    """An object of a list."""

    @property
    def id(self) -> str:
        """The id, by which a page begins after an object."""

    def public(self) -> dict[str, Any]:
        """The object as clients get it."""


def page_of(request: Request, objects: Sequence[Listed], usual: int, most: int) -> dict[str, Any]:
    """A page of objects that are sorted from old to new; at first the newest, `usual` of them."""
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(usual)), query.get("after")
    one_of("order", order, ("asc", "desc"))
    if not NUMBER.match(limit) or not 1 <= int(limit) <= most:
        raise invalid("limit", f"limit: got {quoted(limit)}; must be 1 to {most}")
    ordered = list(objects) if order == "asc" else list(reversed(objects))
    names = [each.id for each in ordered]
    if after is not None and after not in names:
        raise invalid("after", f"after: got {quoted(after)}; must be the id of one of the listed objects")
    begin = 0 if after is None else names.index(after) + 1
    some = ordered[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": [each.public() for each in some],
        "first_id": some[0].id if some else None,
        "last_id": some[-1].id if some else None,
        "has_more": begin + len(some) < len(ordered),
    }

"""Names of fields in errors: a dialect's own words in place of ours. Owner: loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from server.errors import ApiError


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which refusals name the client's fields; `names`: our field or path -> the client's."""
    try:
        yield
    except ApiError as error:
        path = error.param or ""
        ours = max((name for name in names if begins(path, name)), key=len, default="")
        if ours:
            error.param = names[ours] + path[len(ours) :]
            if error.message.startswith(ours):
                error.message = names[ours] + error.message[len(ours) :]
            error.message = error.message.replace(f"({path})", f"({error.param})")
        raise


def begins(path: str, name: str) -> bool:
    """Whether a path is a field, or a part of it."""
    return path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[")

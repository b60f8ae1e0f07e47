"""Names of fields in errors: a dialect's own words in place of ours. Owner: loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mm.errors import MediaError
from server.errors import ApiError
from server.render.errors import RenderError

# The path of a part that a dialect made of a media item (Renderer.with_media).
PART = re.compile(r"messages\[0\]\.content\[(\d+)\](?:\.(?:image|audio|video)_url(?:\.url)?)?")


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


@contextmanager
def item_paths(paths: Sequence[str]) -> Iterator[None]:
    """A context in which errors of media name the client's items; `paths`: of each part."""

    def path(text: str) -> str:
        return PART.sub(lambda found: paths[int(found[1])] if int(found[1]) < len(paths) else found[0], text)

    try:
        yield
    except (RenderError, MediaError) as error:
        error.message = path(error.message)
        error.param = path(error.param) if error.param else error.param
        raise

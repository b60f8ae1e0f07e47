"""Sizes of plain data, which are checked before it is rendered or tokenized.

Owner: none, pure functions. In: a conversation or other data of a request. Out: characters or bytes, or RenderError for
data that has none.
"""

from __future__ import annotations

import json
from typing import Any

from server.render.errors import invalid


def text_size(conversation: list[dict[str, Any]]) -> int:
    """Characters in the contents of all messages."""
    size = 0
    for message in conversation:
        content = message["content"]
        size += len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content or ())
    return size


def json_size(value: Any, param: str) -> int:
    """Bytes of plain data as JSON; refuses text that is not valid Unicode."""
    try:
        return len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} contains half of a surrogate pair, which is no character.", param) from error
    except (RecursionError, ValueError) as error:
        raise invalid(f"{param} nests too deeply.", param) from error

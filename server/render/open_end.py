"""A last message that the answer continues: its end is tagged before the template runs, and the text is cut at the tag.

Owner: any thread, pure functions. In: a conversation in the form for templates. Out: a tag, and the text up to it; or
RenderError.
"""

from __future__ import annotations

import secrets
from typing import Any

from server.render.errors import RenderError, invalid


def open_last(conversation: list[dict[str, Any]]) -> str:
    """Appends a random tag to the last message's text; `cut_at` cuts the rendered text at the tag."""
    tag = f"continue-{secrets.token_hex(16)} "
    last = conversation[-1]
    content = last["content"]
    if isinstance(content, str):
        conversation[-1] = {**last, "content": content + tag}
        return tag
    for index in range(len(content or ()) - 1, -1, -1):
        if content[index]["type"] == "text":
            content[index] = {"type": "text", "text": content[index]["text"] + tag}
            return tag
    raise invalid("continue_final_message needs text in the last message.", "continue_final_message")


def cut_at(text: str, tag: str) -> str:
    at = text.rfind(tag.strip())
    if at < 0:
        raise RenderError(
            400,
            "template_error",
            "The chat template leaves out the last message, so it cannot be continued.",
            "continue_final_message",
        )
    # If the space after the tag is missing, the template trims the message, so the text is trimmed too.
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()

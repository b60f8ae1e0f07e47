"""Prompts with media in llama.cpp's form: a text with a marker for each item, and the items as base64.

Owner: loop, pure functions. In: an object with prompt_string and multimodal_data. Out: a Marked, then a text with the
model's placeholders, and the items as parts of a message.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from engine.base.request import Modality
from mm.decode.magic import sniff
from server.errors import invalid
from server.render.media import MediaTokens

MARKER = "<__media__>"
SOUNDS = ("wav", "flac", "ogg", "mp3", "m4a")
HEAD = 128  # characters of base64 that hold the bytes by which a format is known


@dataclass(frozen=True, slots=True)
class Marked:
    """A prompt with media."""

    text: str
    items: list[str]  # base64
    path: str  # of the prompt in the body

    def part(self, number: int) -> str:
        return f"{self.path}.multimodal_data[{number}]"


def marked_of(given: dict[str, Any], path: str) -> Marked:
    """The prompt of an object with media."""
    text, items = given.get("prompt_string"), given["multimodal_data"]
    if not isinstance(text, str):
        raise invalid(f"{path}.prompt_string", f"{path}.prompt_string: must be a text with a {MARKER} for each item")
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise invalid(f"{path}.multimodal_data", f"{path}.multimodal_data: must be a list of texts of base64")
    if text.count(MARKER) != len(items):
        places = f"{path}.prompt_string has {text.count(MARKER)} times {MARKER}"
        raise invalid(f"{path}.multimodal_data", f"{path}.multimodal_data: got {len(items)} items, and {places}")
    return Marked(text, items, path)


def with_placeholders(marked: Marked, tokens: MediaTokens) -> tuple[str, list[dict[str, Any]], list[str]]:
    """The text with the model's placeholders, a part of a message for each item, and the paths of the items."""
    pieces = marked.text.split(MARKER)
    for piece in pieces:
        tokens.refuse_in_text(piece, f"{marked.path}.prompt_string")
    written, parts, paths = [pieces[0]], [], []
    for number, (data, piece) in enumerate(zip(marked.items, pieces[1:])):
        kind = modality_of(data)
        paths.append(marked.part(number))
        tokens.require(kind, paths[-1])
        parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/any;base64,{data}"}})
        written += [tokens.placeholders[kind], piece]
    return "".join(written), parts, paths


def modality_of(data: str) -> Modality:
    """Whether an item is a recording or an image, by its first bytes."""
    try:
        head = base64.b64decode(data[:HEAD])
    except binascii.Error:
        return "image"  # the loader refuses what is not base64
    return "audio" if sniff(head) in SOUNDS else "image"

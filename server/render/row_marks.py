"""Rows in place of text: a client's `prompt_embeds` parts in a conversation.

Owner: loop, then the pool that renders; one RowMarks per request. A mark of digits, unique to the request, is written
into a message at the place of the rows. The template passes it on like any text. In the rendered text, each mark is
replaced by one placeholder per row, and the texts between marks are tokenized separately.

    messages -> marks -> template -> "…<mark>…" -> ids | one placeholder per row | ids
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from mm.client_rows import ClientRows
from server.render.errors import RenderError, invalid, kind_of
from server.render.prompt import PromptRows, id_array
from server.render.tokenizer import Tokenizer

Segment = tuple[str, bool]  # (text, whether special tokens in it are plain text)
PLACEHOLDER = 0  # id at the positions of rows, which is never read


class RowMarks:
    """The rows of one conversation, in the order of their parts."""

    def __init__(self) -> None:
        self.rows: list[ClientRows] = []
        self._nonce = f"{secrets.randbelow(10**24):024d}"
        self._mark = re.compile(self._nonce + r"(\d{6})")

    def put(self, rows: ClientRows) -> dict[str, Any]:
        """A text part that marks the place of these rows."""
        self.rows.append(rows)
        return {"type": "text", "text": f"{self._nonce}{len(self.rows) - 1:06d}"}

    def plain(self, text: str) -> str:
        """The rendered text without marks."""
        return self._mark.sub("", text)

    def tokenized(
        self, tokenizer: Tokenizer, segments: list[Segment], add_special_tokens: bool
    ) -> tuple[np.ndarray, tuple[PromptRows, ...]]:
        """int32 ids of a prompt, and the places of rows in it."""
        ids: list[int] = []
        placed: list[PromptRows] = []
        for number, text in self._runs(segments):
            ids += tokenizer.encode_segments(text, add_special_tokens and not ids)
            if number is not None:
                placed.append(PromptRows(len(ids), self.rows[number]))
                ids += [PLACEHOLDER] * len(self.rows[number].numbers)
        return id_array(ids), tuple(placed)

    def _runs(self, segments: list[Segment]) -> Iterator[tuple[int | None, list[Segment]]]:
        """Texts, each with the number of the rows after it."""
        run: list[Segment] = []
        expected = 0
        for text, plain in segments:
            for index, piece in enumerate(self._mark.split(text)):
                if index % 2 == 0:
                    run += [(piece, plain)] if piece else []
                    continue
                if int(piece) != expected:
                    break
                yield expected, run
                run, expected = [], expected + 1
        if expected != len(self.rows):
            text = "the chat template does not keep all prompt_embeds parts, each once and in order"
            raise RenderError(400, "placeholder_mismatch", text, "messages")
        yield None, run


def row_parts(messages: list[dict[str, Any]]) -> Iterator[tuple[list[Any], int, str]]:
    """(content, index in it, path) of each prompt_embeds part of a conversation; the renderer reports other errors."""
    for at, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for k, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "prompt_embeds":
                path = f"messages[{at}].content[{k}]"
                if message.get("role") == "assistant":
                    raise invalid(f"{path}: prompt_embeds do not stand in an assistant's message", path)
                if not isinstance(part.get("data"), str):
                    got = kind_of(part.get("data"))
                    raise invalid(f"{path}.data: got {got}; must be base64 of a tensor", f"{path}.data")
                yield content, k, path

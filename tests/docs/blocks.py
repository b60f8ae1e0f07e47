"""Fenced blocks of README and of the pages, and the output that the line after a block promises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from server import docs

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n(It (?:prints|answers) [^\n]*)\n)?", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """One block; `page` is README or the name of a page."""

    page: str
    number: int  # index among the blocks of the page
    language: str
    code: str
    promise: str  # the line after the block, if the line gives the printed output

    @property
    def printed(self) -> list[str]:
        """The texts of the promise."""
        return re.findall(r"`([^`]+)`", self.promise)

    @property
    def streams(self) -> bool:
        """Whether the promise is about the text of a streamed answer."""
        return self.promise.startswith("It answers")

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


@cache
def text_of(page: str) -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8") if page == "README" else docs.text(page)


@cache
def blocks(language: str = "") -> list[Block]:
    """Blocks of README and of all pages, in order; of one language, if it is named."""
    found = [
        Block(page, number, *match)
        for page in ("README", *docs.NAMES)
        for number, match in enumerate(FENCED.findall(text_of(page)))
    ]
    return [block for block in found if language in ("", block.language)]


def of_page(page: str, language: str) -> list[str]:
    """The code of the blocks of a page in one language."""
    return [block.code for block in blocks(language) if block.page == page]

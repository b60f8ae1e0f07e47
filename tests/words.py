"""Plain English as data: words to avoid in texts for users, limits on sentences, and functions that collect the texts.

Texts are README, the pages, the release notes, the output of `--help`, and every string of the sources that contains a
space and is neither a docstring nor the message of an assertion; this includes error texts and log lines. In pages,
code, tables' code and words in backticks do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from server import docs

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "mm", "engine")
LONGEST = 40  # words of a sentence
MEAN = 20
# Pattern -> words to use instead.
WORDS = {
    r"\btold\b": "reported, emitted, passed",
    r"\btells?\b": "prints, reports, shows",
    r"\b(?:hear|hears|heard)\b": "take audio, receive",
    r"\b(?:nobody|somebody)\b": "no client, a client",
    r"\bstands? (?:beside|behind)\b": "is next to, follows",
    r"\b(?:lies?|lay) beside\b": "is in the same folder as",
    r"\bby turns\b": "interleaved",
    r"\bwhat (?:\w+ ){1,3}(?:says|had)\b": "name the thing",
    r"\bof no \w+\b": "without",
    r"\bcodes stay\b": "quantised weights stay",
    r"\bwidened\b": "dequantised, converted",
    r"\bkept apart\b": "separated",
    r"\b(?:met|meets?)\b": "read, receive",
    r"\bgone through\b": "processed",
    r"\blook alike\b": "are equal in",
}
BANNED = re.compile("|".join(WORDS), re.I)
# Strings that are not for users: TRAINED is part of a prompt from a model's training; code compares VALUES.
TRAINED = "Judge whether the Document meets the requirements"
VALUES = {"by turns", "codes by turns"}
# Files whose strings are code, styles, templates or a list of words.
NOT_PROSE = (
    "server/bench/dataset.py", "server/render/template_choice.py", "server/routes/pages.py",
    "engine/kernels/gemm/diagonals.py",
)  # fmt: skip


def prose(text: str) -> str:
    """A page without code: drops fenced and indented blocks, words in backticks, addresses and marks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^ {4}\S.*$", "", text, flags=re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"`[^`\n]+`(?:,\s`[^`\n]+`)*", "CODE", text)  # a list of names is one word
    return re.sub(r"\]\([^)]*\)", "]", text)


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items, headings and cells of tables."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |\||#)", prose(text)):
        if paragraph.lstrip().startswith("|"):
            yield from (cell.strip() for cell in paragraph.strip().strip("|").split("|"))
        else:
            yield re.sub(r"\s+", " ", re.sub(r"^\s*(?:[-*]|\d+\.|#+) ", "", paragraph)).strip()


def sentences(text: str) -> list[str]:
    """The sentences of a page; lists after a colon and parts between semicolons count as one."""
    return [each for block in blocks(text) for each in split(block) if re.search(r"[a-z]", each)]


def split(block: str) -> list[str]:
    ends = r"(?<=[.!?])[*\")]*\s+(?=[A-Z\"*(\[0-9])|\n\n"
    return [each.strip() for each in re.split(ends, block) if each.strip()]


@cache
def pages() -> dict[str, str]:
    """README, the pages, the release notes and the policy, by name."""
    files = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md", ".github/SECURITY.md")
    }
    return files | {f"server/docs/{name}.md": docs.text(name) for name in docs.NAMES}


@cache
def strings() -> list[tuple[str, str]]:
    """Place and text of every string of the sources that may reach a user; values in an f-string become "X"."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            found += [(f"{name}:{line}", text) for line, text in strings_of(ast.parse(path.read_text()))]
    return found


def strings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings below a node."""
    nodes = list(ast.walk(tree))
    skipped = {id(part) for node in nodes for part in left_out(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)}
            yield node.lineno, joined(node)
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if " " in text and id(node) not in skipped and text not in VALUES and not text.startswith(TRAINED):
            yield node.lineno, text


def joined(node: ast.JoinedStr) -> str:
    parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    return "".join(map(str, parts))


def left_out(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, and messages of assertions, which no user reads."""
    if isinstance(node, ast.Assert) and node.msg is not None:
        yield from ast.walk(node.msg)
    if (
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) == "AssertionError"
    ):
        yield from ast.walk(node.exc)
    has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if has_body and node.body and isinstance(node.body[0], ast.Expr):  # type: ignore[attr-defined]
        yield node.body[0].value  # type: ignore[attr-defined]

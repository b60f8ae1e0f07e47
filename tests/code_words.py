"""Finds the lines of docstrings, comments and names that hold a word which is no term of the field.

STYLE.md section 5 lists the words. In: the project's files. Out: places and lines; a test bounds their number.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("server", "engine", "mm", "_fast", "tests")
PRIVATE = re.compile(
    r"\b(told|tells?|hears?|heard|shown|nobody|somebody|kept|beside|ahead|spread|joints?|leads?|by turns)\b",
    re.IGNORECASE,
)
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PROSE = re.compile(r'""".*?"""|/\*.*?\*/|(?:#|//)[^\n]*', re.DOTALL)  # docstrings and comments of Cython and C


def private_lines() -> list[str]:
    """`file:line: text` of each docstring line, comment line and name that holds a word of PRIVATE."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".pyx", ".pxd", ".c", ".h") or path == Path(__file__).resolve():
            continue
        text = path.read_text()
        if PRIVATE.search(text.replace("_", " ")):
            lines = sorted(set(_python(text) if path.suffix == ".py" else _other(text)))
            found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines]
    return found


def _python(text: str) -> Iterator[tuple[int, str]]:
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and PRIVATE.search(token.string):
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, *NAMED)):
            continue
        if isinstance(node, NAMED) and PRIVATE.search(node.name.replace("_", " ")):
            yield node.lineno, node.name
        if ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            yield from ((n, lines[n - 1]) for n in range(first, last + 1) if PRIVATE.search(lines[n - 1]))


def _other(text: str) -> Iterator[tuple[int, str]]:
    for match in PROSE.finditer(text):
        first = text.count("\n", 0, match.start()) + 1
        yield from ((first + n, line) for n, line in enumerate(match[0].split("\n")) if PRIVATE.search(line))

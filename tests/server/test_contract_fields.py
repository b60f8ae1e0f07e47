"""Every field of a request has a test that fails when the field is ignored (contract_fields.py)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

from server.dialects.table import operations
from tests.server.contract_fields import NO_EFFECT, TESTS

HERE = Path(__file__).parent
CASES = [
    (kind, field, test) for kind, tests in TESTS.items() for test, fields in tests.items() for field in fields.split()
]


def own_fields(kind: type[msgspec.Struct]) -> set[str]:
    """Fields that the type itself declares, without inherited ones."""
    return {name for name in kind.__struct_fields__ if name in vars(kind)}


@cache
def sources(file: str) -> dict[str, str]:
    """Each test's source, with its parameters and the tables, fixtures and functions of the file that it names."""
    text = (HERE / file).read_text("utf-8")
    lines = text.splitlines()
    parts: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min([node.lineno, *(line.lineno for line in node.decorator_list)])
            parts[node.name] = "\n".join(lines[begin - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return {
        name: own + "".join(parts[other] for other in parts if re.search(rf"\b{other}\b", own))
        for name, own in parts.items()
        if name.startswith("test_")
    }


@pytest.mark.parametrize("kind", TESTS, ids=lambda kind: kind.__name__)
def test_every_field_names_its_test(kind):
    named = [field for fields in TESTS[kind].values() for field in fields.split()]
    without = NO_EFFECT.get(kind, "").split()
    assert len(named) == len(set(named)), "a field is named twice"
    assert not set(named) & set(without)
    missing = own_fields(kind) - set(named) - set(without)
    assert not missing, f"{kind.__name__}: no test would notice if {sorted(missing)} were ignored"
    assert set(named) | set(without) <= set(kind.__struct_fields__), "a field is gone"


@pytest.mark.parametrize(("kind", "field", "test"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_named_test_speaks_of_the_field(kind, field, test):
    file, _, name = test.partition("::")
    text = sources(file).get(name)
    assert text is not None, f"{test} is gone"
    assert re.search(rf"\b{field}\b", text), f"{test} does not mention {field}"


def test_every_body_of_the_api_is_in_the_table():
    assert {operation.body for operation in operations().values() if operation.body is not None} <= set(TESTS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "field", "test"),
    CASES,
    ids=[f"{kind.__name__}.{field}" for kind, field, _ in CASES],
)
def test_the_named_test_fails_when_the_field_is_ignored(kind, field, test):
    plugin = ["-p", "tests.server.ignoring", "--ignoring", f"{kind.__name__}.{field}"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugin, f"tests/server/{test}"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 1, f"status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-1000:]}"

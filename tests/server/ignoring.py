"""A pytest plugin: `-p tests.server.ignoring --ignoring TypeName.field` makes the server ignore that field.

The long form of test_contract_fields.py uses it. Code that reads the field of a decoded body gets None, the value of an
absent field.
"""

from __future__ import annotations

import pytest

from tests.server.contract_fields import TESTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ignoring", required=True)


def pytest_configure(config: pytest.Config) -> None:
    kind_name, _, field = config.getoption("--ignoring").partition(".")
    (kind,) = [kind for kind in TESTS if kind.__name__ == kind_name]
    assert field in kind.__struct_fields__
    setattr(kind, field, property(lambda self: None))

"""The tables of README and of the pages are those that the code makes."""

from __future__ import annotations

import re

import pytest

from engine.models.lookup import families
from tests.tables import TABLES, written
from tests.tables.memory import CARDS, ROWS, row_of, smaller_card_refuses


@pytest.mark.parametrize("name", [name for name in TABLES if name != "memory"])
def test_a_page_holds_the_table_that_the_code_makes(name):
    assert written(name) == TABLES[name][1](), "run python -m tests.tables"


def test_the_tables_name_every_architecture_and_route():
    assert all(f"`{name}`" in written("architectures") for name in families())
    assert "`POST /v1/chat/completions`" in written("routes")
    assert "`POST /v1/embeddings`" in written("routes")


@pytest.mark.parametrize("name", ROWS)
def test_the_memory_table_is_what_check_prints(name):
    (line,) = (line for line in written("memory").splitlines() if line.startswith(f"| {name} |"))
    card = int(re.findall(r"(\d+) GiB \|$", line)[0])
    assert card in CARDS
    assert row_of(name, card) == line
    assert smaller_card_refuses(ROWS[name], card)

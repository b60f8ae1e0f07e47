"""README's support table says what the registry, the weight loader and the route table hold."""

from __future__ import annotations

from engine.models.registry import FAMILIES
from tests.support_table import README, in_readme, routes, support_table


def test_readme_holds_the_table_that_the_registry_makes():
    assert in_readme(README.read_text(encoding="utf-8")) == support_table(), "run python -m tests.support_table"


def test_the_table_names_every_architecture_and_route():
    table = support_table()
    assert all(f"`{name}`" in table for name in FAMILIES)
    assert "`/v1/chat/completions`" in routes()
    assert "`/v1/embeddings`" in routes()

"""README's support table says what the families, the weight loader and the route table hold."""

from __future__ import annotations

from engine.models.lookup import families
from tests.support_table import README, in_readme, routes, support_table


def test_readme_holds_the_table_that_the_families_make():
    assert in_readme(README.read_text(encoding="utf-8")) == support_table(), "run python -m tests.support_table"


def test_the_table_names_every_architecture_and_route():
    table = support_table()
    assert all(f"`{name}`" in table for name in families())
    assert "`/v1/chat/completions`" in routes()
    assert "`/v1/embeddings`" in routes()

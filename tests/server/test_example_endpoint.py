"""CONTRIBUTING.md's example of an endpoint: one file, and one entry of the table."""

from __future__ import annotations

from server.app import make_app
from server.routes import table
from tests.contributing import example
from tests.server.asgi import Client


async def test_the_example_answers(tmp_path, monkeypatch, state):
    monkeypatch.setattr(table, "FAMILIES", (*table.FAMILIES, example("endpoint", tmp_path)))
    answer = await Client(make_app(state)).get("/uptime")
    assert answer.status == 200
    assert answer.json()["seconds"] >= 0
